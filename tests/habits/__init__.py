"""Code as PyTorch users write it, with the engine and in plain PyTorch."""
