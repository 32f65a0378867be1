"""The optimizer step: chunk updates on each tier, updates during backward, placement of states."""
