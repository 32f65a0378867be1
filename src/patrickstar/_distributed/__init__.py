"""Groups of processes over torch.distributed: who they are, and collectives on chunks (PatrickStar §7)."""
