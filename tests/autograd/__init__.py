"""The models that break chunk managers; each must train bit for bit as plain PyTorch does, or be refused by name."""
