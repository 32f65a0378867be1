"""Training step of a language model, for dry runs."""

from typing import Any

import torch

from patrickstar._dry_run.simulation import Step


def training_step(ids: torch.Tensor, accumulation: int = 1, max_norm: float = 0.0) -> Step:
    """Return a step of a training loop over equal batches.

    Args:
        ids: Token ids of a batch; only their shape matters.
        accumulation: Batches per optimizer step.
        max_norm: Norm to which gradients are clipped; 0: they are not.
    """

    def step(engine: Any) -> None:
        for number in range(accumulation):
            loss = engine(input_ids=ids, labels=ids).loss / accumulation
            engine.backward(loss, accumulate=number < accumulation - 1)
        if max_norm > 0:
            engine.clip_grad_norm_(max_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step


def token_ids(batch: int, sequence: int) -> torch.Tensor:
    """Return token ids of the shape of a batch."""
    return torch.zeros(batch, sequence, dtype=torch.int64, device="cpu")
