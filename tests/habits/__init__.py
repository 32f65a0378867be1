"""What PyTorch users write, with the engine and in plain PyTorch."""
