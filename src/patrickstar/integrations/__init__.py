"""Other libraries' ways to train, on top of the engine. Nothing below imports this room."""
