"""Checkpoints: folders of safetensors files and one document, written and read through torch.distributed.checkpoint."""
