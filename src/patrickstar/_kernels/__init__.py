"""The arithmetic of the update."""
