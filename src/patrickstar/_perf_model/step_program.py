"""Linear program of a step: shares of model data, capacities of memory tiers, and the time of the busiest resource."""

from enum import Enum

from patrickstar._perf_model.channels import ChannelCost, channels, total
from patrickstar._perf_model.frozen_data import FrozenData
from patrickstar._perf_model.linear_program import Expression, Solution, Variables, minimize
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.model_data import ModelDataShare
from patrickstar._perf_model.param_placement import ShareVariables
from patrickstar._perf_model.workload import LOCK_FREE_BYTES, STATE_BYTES, Workload
from patrickstar.errors import ConfigError


class MemoryTier(Enum):
    """Memory tiers; the values are their names in messages."""

    DEVICE = "device memory"
    HOST = "host memory"
    DISK = "disk"


class StepProgram:
    """Linear program of one step of the processes of a mesh on equal machines.

    Attributes:
        model_data: Trained parameters: dense ones, and experts if there are some.
        frozen: Frozen parameters; None if there are none.
        time: Variable with the seconds of the busiest resource.
        transfers: Variable with the seconds of the busiest one that computation does not wait for.
        extra: Variable for missing memory.
        used: Bytes on one process's device, and of all processes of a node in its memory and on its disk.
    """

    def __init__(self, work: Workload, machine: Machine, mesh: Mesh, lock_free: bool = False) -> None:
        if mesh.nodes > 1 and machine.network is None:
            raise ConfigError(
                f"nodes={mesh.nodes}: {machine.name} has no network; add a section [network] with bandwidth and "
                "latency_s to its machine file"
            )
        self._work, self._machine, self._mesh, self._lock_free = work, machine, mesh, lock_free
        classes = [(work.params, mesh.dense)]
        if work.experts is not None:
            classes.append((work.experts.params, mesh.experts))
        shares = ShareVariables.COUNT * len(classes)
        frozen = FrozenData.COUNT if work.frozen_bytes else 0
        variables = Variables(shares + frozen + 3)
        self.one = variables.one
        self.time, self.transfers, self.extra = (variables[shares + frozen + index] for index in range(3))
        self.model_data = [
            ModelDataShare(numel, work.param_bytes, group, mesh.gpus, variables, ShareVariables.COUNT * index)
            for index, (numel, group) in enumerate(classes)
        ]
        self.frozen = FrozenData(work.frozen_bytes, mesh.dense, mesh.gpus, variables, shares) if frozen else None
        self.used = self._used()
        self._equalities = [expression for data in self.model_data for expression in data.equalities]

    def channels(self) -> list[ChannelCost]:
        """Return the resources of the step."""
        return channels(self._work, self._machine, self._mesh, self.model_data, self.frozen, self.one, self._lock_free)

    @property
    def nbytes(self) -> float:
        """Bytes of the model data of one process on all tiers."""
        return sum(data.nbytes for data in self._all_data)

    @property
    def _all_data(self) -> list[ModelDataShare | FrozenData]:
        return [*self.model_data, *([] if self.frozen is None else [self.frozen])]

    def minimize(self, objective: Expression, *limits: Expression) -> Solution | None:
        """Return the placement within all capacities and limits that minimizes the objective; None if there is none."""
        return minimize(objective, [*self._capacity_limits(), *limits], self._equalities)

    @property
    def sweep(self) -> Expression:
        """Seconds in which the disk reads and writes all states on it once, in both directions at the same time."""
        disk = self._machine.disk
        if disk is None:
            return 0 * self.one
        return total([data.states_on_disk_bytes for data in self.model_data]) / min(disk.read, disk.write)

    def _used(self) -> dict[MemoryTier, Expression]:
        work = self._work
        outside = self.one * work.device_bytes
        host_bytes = total([data.host_bytes for data in self._all_data])
        if self._lock_free:
            states = sum(data.node_states_bytes for data in self.model_data)
            host_bytes = host_bytes + self.one * (LOCK_FREE_BYTES * states / STATE_BYTES)
        return {
            MemoryTier.DEVICE: outside + total([data.device_bytes for data in self._all_data]),
            MemoryTier.HOST: host_bytes,
            MemoryTier.DISK: total([data.disk_bytes for data in self._all_data]),
        }

    def _capacity_limits(self) -> list[Expression]:
        """Return expressions that must not be above zero."""
        machine, used, one = self._machine, self.used, self.one
        disk_bytes = machine.disk.capacity if machine.disk is not None else 0
        if machine.gpu is not None:
            in_memory = [
                used[MemoryTier.DEVICE] - one * machine.gpu.memory,
                used[MemoryTier.HOST] - one * machine.host.memory,
            ]
        else:  # one memory for both tiers
            in_memory = [used[MemoryTier.DEVICE] + used[MemoryTier.HOST] - one * machine.host.memory]
        limits = [limit for data in self._all_data for limit in data.limits]
        return [*in_memory, used[MemoryTier.DISK] - one * disk_bytes, *limits]
