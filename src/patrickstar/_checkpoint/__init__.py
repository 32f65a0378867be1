"""Checkpoints: safetensors files and a manifest, saved and loaded through torch.distributed.checkpoint."""
