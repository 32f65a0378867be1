"""The original PatrickStar, v0.4.3, simulated: the published figures are compared with what its policy predicts."""
