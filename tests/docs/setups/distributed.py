from docs.samples import batches, engine_of

engine = engine_of()
optimizer = engine.optimizer
steps = [batches(), batches()]
