"""Autograd modes in which the engine works on parameters."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def managing() -> Iterator[None]:
    """Disable gradients and inference mode, since tensors created here outlive the user's mode."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
        yield
