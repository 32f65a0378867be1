"""Optimizer step: chunk updates on each tier, updates during backward, and placement of optimizer states."""
