from docs.samples import batches
from integrations.tiny import gpt2

model, loader = gpt2(), batches()
