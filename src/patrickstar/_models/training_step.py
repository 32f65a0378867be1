"""Training step of a language model, for dry runs."""

from collections.abc import Mapping
from typing import Any

import torch

from patrickstar._dry_run.simulation import Step


def training_step(inputs: Mapping[str, torch.Tensor], accumulation: int = 1, max_norm: float = 0.0) -> Step:
    """Return a step of a training loop over equal batches.

    Args:
        inputs: Keyword arguments of the model for a batch; only their shapes matter.
        accumulation: Batches per optimizer step.
        max_norm: Norm to which gradients are clipped; 0: they are not.
    """

    def step(engine: Any) -> None:
        for number in range(accumulation):
            loss = engine(**inputs).loss / accumulation
            engine.backward(loss, accumulate=number < accumulation - 1)
        if max_norm > 0:
            engine.clip_grad_norm_(max_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step
