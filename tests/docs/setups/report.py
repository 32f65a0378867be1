from docs.samples import batches, engine_of

engine = engine_of()
optimizer, batches = engine.optimizer, batches()
