"""Process groups over torch.distributed, and collectives on chunks (PatrickStar §7)."""
