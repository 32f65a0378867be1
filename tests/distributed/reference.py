"""Reference for several processes: plain PyTorch in each, with gradients averaged in a specified order."""

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
    """Plain PyTorch under the mixed-precision protocol, with gradients averaged over all processes.

    Gradients that a process accumulated in fp32 are rounded to the parameter's dtype, unless `reduce_dtype` is fp32.
    The gradients of all processes are added in fp32 in the order of ranks, starting from +0; a missing gradient counts
    as zero. The sum is rounded likewise. Sums of several reductions are added in fp32, and divided in the step.

    With `replicas` of consecutive ranks, the gradients of each replica are added so, and then their sums, starting from
    +0. `rounds_partial_sums`: as collectives of an accelerator do.
    """

    def __init__(self, *args: Any, replicas: int = 1, rounds_partial_sums: bool = False) -> None:
        super().__init__(*args)
        self.replicas = replicas
        self.rounds_partial_sums = rounds_partial_sums
        self.averaged = False
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.optimizer = AveragingOptimizer(self)

    def backward(self, loss: torch.Tensor, *args: Any, accumulate: bool = False, **options: Any) -> None:
        super().backward(loss, *args, **options)
        if not accumulate:
            self.reduce()

    @property
    def batches(self) -> int:
        """Number of distinct batches that all processes together compute gradients of."""
        return dist.get_world_size()

    def members(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the group of the processes whose gradients of a parameter are added. Default None: all."""
        return None

    def reduce(self) -> None:
        """Add the gradients of all processes to the sums, and drop them."""
        counts = torch.tensor([float(master.grad is not None) for master in self.masters.values()])
        dist.all_reduce(counts)
        for (param, master), count in zip(self.masters.items(), counts.tolist(), strict=True):
            if not count:
                continue
            total = self._total(param, master, self.members(param))
            self.sums[param] = self.sums[param] + total if param in self.sums else total
            master.grad = None

    def _total(self, param: nn.Parameter, master: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        dtype = master.dtype if self.config.reduce_dtype == "fp32" else param.dtype
        own = torch.zeros(master.shape, dtype=dtype)
        if master.grad is not None:
            own.copy_(master.grad)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        partial, shards = [], len(gathered) // self.replicas
        for replica in range(self.replicas):
            partial.append(torch.zeros(master.shape, dtype=master.dtype))
            for grad in gathered[replica * shards : (replica + 1) * shards]:
                partial[-1] += grad
        total = torch.zeros(master.shape, dtype=master.dtype)
        for part in partial:
            total += part.to(dtype) if self.rounds_partial_sums else part
        return total.to(dtype).to(master.dtype)

    def unscale(self) -> None:
        if not self.averaged:
            self.averaged = True
            self.reduce()
            for param, total in self.sums.items():
                self.masters[param].grad = (total * (1.0 / self.batches)).to(param.device)
            self.sums.clear()
        super().unscale()
