"""Memory layout of chunks: arithmetic on names, element counts and bytes. Does not import torch."""
