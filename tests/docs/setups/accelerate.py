import torch
from docs.samples import sequences
from integrations.tiny import gpt2

model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(sequences(), batch_size=2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
