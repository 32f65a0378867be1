"""Distribution of a model over processes: batches, parts of parameters, and processes that decide alike."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from patrickstar._distributed.data_mesh import SINGLE_BATCH, DataMesh
from patrickstar._distributed.linked_processes import LinkedProcesses
from patrickstar._distributed.param_sharding import ParamSharding, check_parallelism, linked_processes, shard_params
from patrickstar._distributed.process_group import Processes, World
from patrickstar._distributed.single_process import SingleProcess


@dataclass(frozen=True)
class Distribution:
    """Distribution of a model and its batches over processes.

    Attributes:
        mesh: Data-parallel processes.
        shardings: Part of each parameter that this process holds; empty with one process.
        linked: Processes that operators link to this one, None if there are none.
        world: All processes, None if this is the only one.
    """

    mesh: DataMesh = SINGLE_BATCH
    shardings: Mapping[str, ParamSharding] = field(default_factory=dict)
    linked: LinkedProcesses | None = None
    world: World | None = None

    @classmethod
    def of(cls, world: Processes, module: nn.Module, mesh: Any) -> "Distribution":
        """Read the distribution from a device mesh and from the parameters that are DTensors.

        All processes must call this together.

        Raises:
            ConfigError: The mesh does not divide the processes.
            ModelError: The model is under another kind of data parallelism, or a gradient could not be averaged.
        """
        check_parallelism(module)
        if isinstance(world, SingleProcess):
            return cls()
        data_mesh = DataMesh.of(world, mesh)
        shardings = shard_params(world, data_mesh, module)
        partition = linked_processes(world, module)
        links = any(len(ranks) > 1 for ranks in partition)
        return cls(data_mesh, shardings, LinkedProcesses(world.group(partition)) if links else None, world)

    def explain_lost_process(self) -> AbstractContextManager[None]:
        """Return a context in which errors of operators' collectives name a process that has ended."""
        if self.linked is None or self.world is None:
            return nullcontext()
        return self.world.explain_lost_process()

    def common_memory(self, budgets: tuple[int, int], library_bytes: int) -> tuple[tuple[int, int], int]:
        """Return the smallest budgets and the largest bytes of libraries of linked processes."""
        if self.linked is None:
            return budgets, library_bytes
        device, host = (-self.linked.largest(-nbytes) for nbytes in budgets)
        return (device, host), self.linked.largest(library_bytes)
