"""Simulation of the original PatrickStar v0.4.3, to compare its published figures with what its policy predicts."""
