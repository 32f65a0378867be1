import torch
from docs.samples import batches, engine_of


class Loader:
    """Loader whose position is saved."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


engine, loader, steps = engine_of(), Loader(), 100
optimizer = engine.optimizer
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
for batch in batches():
    engine.backward(engine(**batch).loss)
optimizer.step()
