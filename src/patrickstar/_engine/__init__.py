"""Engine, optimizer and checkpoints as users see them."""
