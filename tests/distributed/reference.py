"""What several processes must come to: plain PyTorch in each, gradients averaged in a stated order."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar import testing


class AveragingOptimizer(testing.ReferenceOptimizer):
    """Optimizer of `AveragingTrainer`."""

    trainer: "AveragingTrainer"

    def step(self) -> None:
        super().step()
        self.trainer.averaged = False

    def zero_grad(self) -> None:
        self.trainer.sums.clear()
        super().zero_grad()


class AveragingTrainer(testing.ReferenceTrainer):
    """Plain PyTorch under the mixed-precision protocol, with gradients that are averaged over all processes.

    What a process has, added up in fp32 over the backwards it accumulates, is rounded to the parameter's dtype, unless
    `reduce_dtype` is fp32. Processes are added up in fp32, rank after rank, from +0; one that has no gradient counts as
    zero. The sum is rounded likewise. Sums of several backwards are added in fp32, and the step divides them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.averaged = False
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.optimizer = AveragingOptimizer(self)

    def backward(self, loss: torch.Tensor, *args: Any, accumulate: bool = False, **options: Any) -> None:
        super().backward(loss, *args, **options)
        if not accumulate:
            self.add_up()

    def add_up(self) -> None:
        """Add what all processes have to the sums; they have nothing then."""
        size = dist.get_world_size()
        has = torch.tensor([float(master.grad is not None) for master in self.masters.values()])
        dist.all_reduce(has)
        for (param, master), any_has in zip(self.masters.items(), has.tolist(), strict=True):
            if not any_has:
                continue
            dtype = master.dtype if self.config.reduce_dtype == "fp32" else param.dtype
            mine = torch.zeros(param.shape, dtype=dtype)
            if master.grad is not None:
                mine.copy_(master.grad)
            found = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(found, mine)
            total = torch.zeros(param.shape, dtype=master.dtype)
            for one in found:
                total += one
            total = total.to(dtype).to(master.dtype)
            self.sums[param] = self.sums[param] + total if param in self.sums else total
            master.grad = None

    def unscale(self) -> None:
        if not self.averaged:
            self.averaged = True
            self.add_up()
            for param, total in self.sums.items():
                self.masters[param].grad = total * (1.0 / dist.get_world_size())
            self.sums.clear()
        super().unscale()
