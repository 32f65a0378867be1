"""What several processes must come to: plain PyTorch in each, gradients averaged in a stated order."""

from typing import Any

import torch
import torch.distributed as dist

from patrickstar import testing


class AveragingTrainer(testing.ReferenceTrainer):
    """Plain PyTorch under the mixed-precision protocol; before a step the gradients of all processes are averaged.

    Each process's gradient has its own dtype (after accumulation fp32, rounded to it). They are added up in fp32, rank
    after rank, from +0, and rounded to that dtype, or with `full` not; a process without one counts as zero.
    """

    full = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.averaged = False

    def average(self) -> None:
        """Have the averages in place of the gradients, once per step."""
        if self.averaged:
            return
        self.averaged = True
        size = dist.get_world_size()
        for param, master in self.masters.items():
            if not param.requires_grad and param not in self.trained:
                continue
            has = torch.tensor([0.0 if master.grad is None else 1.0])
            everybody = [torch.zeros(1) for _ in range(size)]
            dist.all_gather(everybody, has)
            if not any(one.item() for one in everybody):
                continue
            mine = torch.zeros_like(param, memory_format=torch.contiguous_format)
            if master.grad is not None:
                mine.copy_(master.grad)
            found = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(found, mine)
            total = torch.zeros_like(mine, dtype=master.dtype)
            for one in found:
                total += one
            if not self.full:
                total = total.to(param.dtype).to(master.dtype)
            master.grad = total * (1.0 / size)

    def unscale(self) -> None:
        self.average()
        super().unscale()


class Loop:
    """The usual loop over either trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def run(self, batches: list[Any], *, accumulation: int = 1, max_norm: float | None = None) -> list[torch.Tensor]:
        """Train on these; returns losses, norms and gradients."""
        trainer, seen = self.trainer, []
        for number, batch in enumerate(batches, start=1):
            loss = trainer(*batch)
            trainer.backward(loss / accumulation)
            seen.append(loss.detach().clone())
            if number % accumulation and number < len(batches):
                continue
            if max_norm is not None:
                seen.append(trainer.clip_grad_norm_(max_norm).clone())
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            if isinstance(trainer, AveragingTrainer):
                trainer.averaged = False
        return seen
