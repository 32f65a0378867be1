"""Construction of a model whose processes, or whose memory, can't hold all of it at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from patrickstar._distributed.process_group import Processes
from patrickstar._hardware.cpu_allocator import cpu_allocator
from patrickstar._hardware.direct_io import free_bytes
from patrickstar._hardware.file_backed_tensors import FileBackedTensors
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar.config import Disk
from patrickstar.errors import ModelError

# [Note: construction in turns]
# A model's own code draws its parameters, in any order and more than once, so that every process has to run all of it
# to have the bits, and the random states afterwards, of a plain construction. With p processes on a machine p whole
# models in full precision would be in its memory, before each keeps 1/p of one: 32 bytes per parameter for eight
# processes, which train with 14. So the layout is agreed on by a model on the meta device, which takes no memory. Then
# as many processes at a time build the model as the budgets have room for beside the shards of all others, move
# their parts into chunks, parameter by parameter, and let the next ones build.
#
# A function that communicates with other processes can't run in turns: what it waits for would never come. All run
# such a function at once, and one that fails on the meta device.


@dataclass
class Construction:
    """A model that is built, or that will be when it is this process's turn.

    Attributes:
        described: The model as plans need it: built, or on the meta device.
    """

    described: nn.Module
    _build: Callable[[], nn.Module] | None = None

    @classmethod
    def of(cls, model: nn.Module | Callable[[], nn.Module], world: Processes, put_off: bool) -> "Construction":
        """Build a model now, or describe it if that is put off and possible. All processes call this together."""
        described = None if isinstance(model, nn.Module) or not put_off else _describe(model)
        everywhere = all(world.all_gather_object(described is not None))
        if isinstance(model, nn.Module):
            return cls(model)
        return cls(model()) if described is None or not everywhere else cls(described, model)

    @property
    def put_off(self) -> bool:
        """True if the model is to be built in turn."""
        return self._build is not None

    @contextmanager
    def built(
        self, world: Processes, share_bytes: int, budget_bytes: int, file: "ModelFile | None" = None
    ) -> Iterator[nn.Module]:
        """Return a context with the built model: it waits for this process's turn, and its end begins the next one.

        Args:
            share_bytes: Bytes of memory for this process's part of the model data.
            budget_bytes: Budgets of this process in the machine's memory.
            file: Where a model is built that memory can't hold; None if it can.

        Raises:
            ModelError: The function has built another model than on the meta device.
        """
        if self._build is None:
            yield self.described
            return
        own, count = self._turns(world, share_bytes, budget_bytes)
        for _ in range(own):
            world.all_gather_object(None)
        with file.built(self._build) if file is not None else nullcontext(self._build()) as module:
            _check_same(self.described, module)
            yield module
        for _ in range(own, count):  # the end of each turn, its own included
            world.all_gather_object(None)

    def _turns(self, world: Processes, share_bytes: int, budget_bytes: int) -> tuple[int, int]:
        """Agree on turns. Return the number of this process's, and of the last one on any machine, plus one."""
        model_bytes = sum(tensor.nbytes for tensor in (*self.described.parameters(), *self.described.buffers()))
        ranks = world.local_ranks
        agreed = world.all_gather_object(most_at_once(len(ranks), model_bytes, share_bytes, budget_bytes))
        own = ranks.index(world.rank) // min(agreed[rank] for rank in ranks)
        return own, max(world.all_gather_object(own)) + 1


def most_at_once(processes: int, model_bytes: int, share_bytes: int, budget_bytes: int) -> int:
    """Return how many processes of a machine may build the model at once, at least one.

    While the last ones build theirs, the others have their shares.
    """
    fits = (
        count
        for count in range(processes, 1, -1)
        if (processes - count) * share_bytes + count * max(model_bytes, share_bytes) <= processes * budget_bytes
    )
    return next(fits, 1)


def _describe(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model on the meta device; None if its construction needs other processes, or real memory."""
    # Imported on first use: the dry run would add to `import patrickstar`.
    from patrickstar._dry_run.simulation import kept_global_state, on_meta

    before = _collectives()
    try:
        with kept_global_state(torch.device("cpu")):
            module = on_meta(build)
    except Exception:  # the function's own code, which may do anything; it runs again, and its error is the user's
        return None
    divided = any(isinstance(param, DTensor) or not param.is_meta for param in module.parameters())
    return None if divided or _collectives() != before else module


def _collectives() -> int:
    """Return the number of collectives that the process groups of this process have issued."""
    if not dist.is_initialized():
        return 0
    groups: list[Any] = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    count = 0
    for group in groups:
        with suppress(RuntimeError):  # of a backend that does not count
            count += group._get_sequence_number_for_group()
    return count


def _check_same(described: nn.Module, module: nn.Module) -> None:
    expected, found = (
        {name: (param.shape, param.dtype, param.requires_grad) for name, param in each.named_parameters()}
        for each in (described, module)
    )
    if expected == found:
        return
    name = next(name for name in (*expected, *found) if expected.get(name) != found.get(name))
    raise ModelError(
        f"the function that builds the model has built two different ones: parameter {name!r} is "
        f"{_words(expected.get(name))} on the meta device and {_words(found.get(name))} in memory; let it build the "
        f"same at each call, or pass the model itself"
    )


def _words(fact: tuple[torch.Size, torch.dtype, bool] | None) -> str:
    return "missing" if fact is None else f"{tuple(fact[0])} of {fact[1]}{'' if fact[2] else ', frozen'}"


@dataclass(frozen=True)
class ModelFile:
    """File in which a model larger than memory is built. See [Note: building a model larger than memory].

    Attributes:
        capacity_bytes: Largest size of the file.
        memory_bytes: Part of it that may be in memory.
    """

    directory: Path
    capacity_bytes: int
    memory_bytes: int

    @classmethod
    def beside(cls, tier: DiskTier | None, disk: Disk | None, sharing: int, memory_bytes: int) -> "ModelFile | None":
        """Return a file beside the disk tier's, None without a tier. `sharing`: processes that share the disk."""
        if tier is None or disk is None:
            return None
        directory = Path(disk.directory)
        # The swap file is reserved at once: the file system counts it already.
        free = free_bytes(directory) if disk.capacity is None else int(disk.capacity) - sharing * tier.file.nbytes
        return cls(directory, max(0, free // sharing), memory_bytes)

    @contextmanager
    def built(self, build: Callable[[], nn.Module]) -> Iterator[nn.Module]:
        """Return a context with the model, whose parameters are in the file until they move into chunks."""
        allocator = cpu_allocator()
        if allocator is None:
            yield build()
            return
        with FileBackedTensors(allocator, self.directory, self.capacity_bytes, self.memory_bytes) as tensors:
            module = build()
            tensors.stop_allocating()
            # From now on the budgets are for chunks, and one parameter at a time is moved into its chunk.
            tensors.limit_bytes = max((param.nbytes for param in module.parameters()), default=0)
            yield module
