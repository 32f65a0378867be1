"""Causal language models by name, file or folder, which are not built yet."""
