from docs.samples import LossModel, vectors

model, loader = LossModel(), vectors()
