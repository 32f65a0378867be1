"""References for several processes: plain PyTorch in each, with gradients averaged in a specified order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import patrickstar as ps
from patrickstar._lock_free_reference import _parts
from patrickstar._step.update_log import LoggedRun, UpdateRecord


class AveragingOptimizer(ps.testing.ReferenceOptimizer):
    """Optimizer of `AveragingTrainer`."""

    trainer: "AveragingTrainer"

    def step(self) -> None:
        super().step()
        self.trainer.averaged = False

    def zero_grad(self) -> None:
        """Drop gradients. If any process has one, the delay of the last update ends in all."""
        trainer = self.trainer
        if trainer.config.update is not None:
            own = bool(trainer.sums) or any(master.grad is not None for master in trainer.masters.values())
            if any(gathered(own)):
                self.flush()
        trainer.sums.clear()
        trainer.drop_gradients()


class AveragingTrainer(ps.testing.ReferenceTrainer):
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


class MergedLog:
    """Logs of lock-free updates of all processes, whose chunks are numbered one after another."""

    STEP = 10_000

    def __init__(self, path: Path) -> None:
        ranks = range(dist.get_world_size())
        self.runs = [LoggedRun(path.with_name(f"{path.stem}-{rank}{path.suffix}")) for rank in ranks]

    @property
    def pages(self) -> dict[str, Any]:
        """All pages."""
        numbered = enumerate(run.pages.items() for run in self.runs)
        return {str(rank * self.STEP + int(index)): chunk for rank, pages in numbered for index, chunk in pages}

    def at(self, step: int) -> list[UpdateRecord]:
        """Return the updates whose results the forward after a step was the first to read."""
        records = [(rank, record) for rank, run in enumerate(self.runs) for record in run.at(step)]
        return [record._replace(chunk=rank * self.STEP + record.chunk) for rank, record in records]


class LockFreeAveraging(AveragingOptimizer, ps.testing.LockFreeOptimizer):
    """Reference of lock-free updates of several processes, which follows the logs of all."""

    def __init__(self, trainer: AveragingTrainer, path: Path) -> None:
        super().__init__(trainer)
        self.log: Any = MergedLog(path)
        self.parts = _parts(self.log, trainer)


# [Note: gradients on a mesh]
# D processes, those of the data mesh, have distinct batches; the loss of a step is the mean over these. A process's
# part of a DTensor is its *box*. The gradient of a box, in the placements of the parameter, is that of all batches of
# the processes on the DTensor's own mesh: of one batch with tensor parallelism, of several with expert parallelism,
# whose exchange of tokens brings the gradients of other batches along. The gradients of a parameter's *group* are
# added: of processes that hold the same box and whose batches together are all D, each once. The sum is divided by D,
# whatever the size of the group.


@dataclass(frozen=True)
class Held:
    """Part of one parameter that one process holds.

    `box` is the same for processes with the same part of the parameter, `place` for those of them whose gradients are
    added; `batches` are those that this process's gradient is of.
    """

    box: Any
    place: Any
    batches: frozenset[int]


class MeshTrainer(AveragingTrainer):
    """Plain PyTorch on a mesh under the mixed-precision protocol. See [Note: gradients on a mesh].

    Gradients of a group are added and rounded as `AveragingTrainer` does those of all processes. A parameter without
    gradient in all processes is not updated. Masters, states and gradients are those of this process's box.

    Args:
        model: Model whose parameters are plain or DTensors, or a function that builds it.
        config: Configuration.
        mesh: Data mesh, of one or two dimensions.
    """

    def __init__(self, model: nn.Module | Callable[[], nn.Module], config: ps.Config, mesh: DeviceMesh) -> None:
        super().__init__(model, config)
        self.mesh = mesh
        self.data_rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
        """Index of this process's batch."""
        batch_of = gathered(self.data_rank)
        held: list[dict[str, Held]] = gathered(
            {name: _held(param, mesh, batch_of) for name, param in self.module.named_parameters()}
        )
        self.names = {param: name for name, param in self.module.named_parameters()}
        self.ranks = {param: _group(name, held, mesh.size()) for param, name in self.names.items()}
        """Ranks of each parameter's group."""
        own = dist.get_rank()
        self.boxes = {param: held[own][name].box for param, name in self.names.items()}
        """Names of the parts that this process holds, equal for equal parts."""
        boxes = {param: [each[name].box for each in held] for param, name in self.names.items()}
        self.counts = {param: each.index(each[own]) == own for param, each in boxes.items()}
        """Whether this process is the first one with its box of a parameter, whose squares count in the norm."""
        groups = sorted({ranks for each in gathered(set(self.ranks.values())) for ranks in each})
        self.groups = {ranks: _process_group(ranks) for ranks in groups}

    @property
    def batches(self) -> int:
        return self.mesh.size()

    def members(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        return self.groups[self.ranks[param]]

    def squares(self) -> dict[nn.Parameter, float]:
        """Return the sum of squares of each gradient: those of all boxes, in the order of their first ranks."""
        own = super().squares()
        counted = gathered({self.names[param]: square for param, square in own.items() if self.counts[param]})
        totals = {}
        for param in own:
            total = 0.0
            for each in counted:
                total += each.get(self.names[param], 0.0)
            totals[param] = total
        return totals

    def gradients_are_finite(self) -> bool:
        return all(gathered(super().gradients_are_finite()))


@cache  # its threads end with the process
def _process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(ranks)


def _held(param: nn.Parameter, mesh: DeviceMesh, batch_of: list[int]) -> Held:
    if not isinstance(param, DTensor):
        own = dist.get_rank()
        return Held(None, tuple(mesh.mesh.flatten().tolist()), frozenset([batch_of[own]]))
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is not part of the parameter's mesh"
    assert not any(placement.is_partial() for placement in param.placements)
    box = tuple(
        None if placement.is_replicate() else index
        for index, placement in zip(coordinate, param.placements, strict=True)
    )
    return Held(box, tuple(coordinate), frozenset(batch_of[rank] for rank in param.device_mesh.mesh.flatten().tolist()))


def _group(name: str, held: list[dict[str, Held]], batches: int) -> tuple[int, ...]:
    """Return the ranks whose gradients of a parameter are added, and check that they have each batch once."""
    own = held[dist.get_rank()][name]
    ranks = tuple(rank for rank, each in enumerate(held) if (each[name].box, each[name].place) == (own.box, own.place))
    contributed = sorted(batch for rank in ranks for batch in held[rank][name].batches)
    assert contributed == list(range(batches)), f"{name}: the processes {ranks} have gradients of {contributed}"
    return ranks


def gathered(value: Any) -> list[Any]:
    """Return the values of all processes."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
