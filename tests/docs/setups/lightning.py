import lightning
import torch
from docs.samples import LossModel, vectors


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LossModel()

    def training_step(self, batch):
        return self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


module, model = Module(), LossModel()
loader = torch.utils.data.DataLoader(torch.cat(vectors()), batch_size=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
