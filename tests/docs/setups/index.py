from docs.samples import batches, gpt2

model, loader = gpt2(), batches()
