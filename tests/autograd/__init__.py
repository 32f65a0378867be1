"""Models that are hard for chunk managers: each trains bit for bit as in plain PyTorch, or is rejected by name."""
