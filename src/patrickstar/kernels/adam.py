"""Adam over views of chunks: PyTorch's own fused kernel, so that the bits are those of `torch.optim`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class AdamStep:
    """Hyper-parameters of one update of one param group. `decoupled` is AdamW's weight decay, else L2."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


def adam_update(
    masters: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps_before: Sequence[int],
    hyper: AdamStep,
) -> None:
    """Update `masters` and both moments in place, all of the same shape, dtype and device per position.

    `steps_before`: how many updates each parameter has had. Element-wise, hence free of how parameters lie in chunks;
    each parameter is one call of the kernel whatever the chunk, as in `torch.optim`.
    """
    update = adamw if hyper.decoupled else adam
    device = masters[0].device
    update(
        list(masters),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [torch.tensor(float(step), device=device) for step in steps_before],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )
