"""Linear program of a step: shares of model data, capacities of memory tiers, and the time of the busiest resource."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from patrickstar._perf_model.frozen_data import FrozenData
from patrickstar._perf_model.linear_program import Expression, Solution, Variables, minimize
from patrickstar._perf_model.machine_spec import Machine, Network
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.model_data import ModelDataShare
from patrickstar._perf_model.param_placement import ShareVariables
from patrickstar._perf_model.workload import LOCK_FREE_BYTES, Workload
from patrickstar.errors import ConfigError

MESSAGE_BYTES = 128
"""Bytes that a process sends to each other one in a coordination step (`_distributed/coordinator.py`)."""


class MemoryTier(Enum):
    """Memory tiers; the values are their names in messages."""

    DEVICE = "device memory"
    HOST = "host memory"
    DISK = "disk"


@dataclass(frozen=True, eq=False)
class ChannelCost:
    """Busy seconds and amount of one resource for one process; seconds of shared resources count all of the node.

    `blocking_s`: seconds that computation waits for, in proportion to the tokens.
    """

    name: str
    seconds: Expression
    amount: Expression
    """Bytes or operations."""
    blocking_s: float = 0.0


def total(expressions: Sequence[Expression]) -> Expression:
    """Return the sum of expressions."""
    summed: Expression = np.sum(expressions, axis=0)
    return summed


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
            ModelDataShare(numel, work, group, mesh.gpus, variables, ShareVariables.COUNT * index)
            for index, (numel, group) in enumerate(classes)
        ]
        self.frozen = FrozenData(work.frozen_bytes, mesh.dense, mesh.gpus, variables, shares) if frozen else None
        self.used = self._used()
        self._equalities = [expression for data in self.model_data for expression in data.equalities]

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
            host_bytes = host_bytes + self.one * (LOCK_FREE_BYTES * states / work.state_bytes)
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

    # Resources

    def channels(self) -> list[ChannelCost]:
        """Return the resources of the step; with lock-free updates without the states on disk, for which none waits."""
        work, machine, one, gpus = self._work, self._machine, self.one, self._mesh.gpus
        links = self._links()
        operations_s = (work.operations - work.thin_operations) / machine.matmul_rate(work.matrix_size)
        if work.experts is not None:
            rate = machine.matmul_rate(work.experts.matrix_size)
            operations_s += work.experts.imbalance * work.experts.operations / rate
        blocking_s = sum(link.blocking_s for link in links)
        compute = one * (operations_s + blocking_s)
        h2d_bytes = total([data.h2d_bytes for data in self.model_data])
        d2h_bytes = total([data.d2h_bytes for data in self.model_data])
        read_bytes = total([data.read_bytes(self._lock_free) for data in self.model_data])
        write_bytes = total([data.write_bytes(self._lock_free) for data in self.model_data])
        ram_bytes = total([data.ram_bytes for data in self.model_data])
        if self.frozen is not None:  # only read
            h2d_bytes = h2d_bytes + self.frozen.h2d_bytes
            read_bytes = read_bytes + self.frozen.read_bytes
            ram_bytes = ram_bytes + self.frozen.ram_bytes
        ram_bytes = ram_bytes + read_bytes + write_bytes
        on_device = total([data.device_update_bytes for data in self.model_data]) + one * work.other_bytes
        if machine.gpu is not None:
            compute = compute + on_device / machine.gpu.memory_bandwidth
        else:
            ram_bytes = ram_bytes + on_device
        h2d, d2h = machine.transfer_rates(gpus)
        memory = machine.host.update_bandwidth(gpus, max(1, machine.host.cores // gpus))
        found = [
            ChannelCost("compute", compute, one * work.all_operations, blocking_s),
            ChannelCost("host to device", h2d_bytes / h2d, h2d_bytes),
            ChannelCost("device to host", d2h_bytes / d2h, d2h_bytes),
            ChannelCost("host memory", ram_bytes * gpus / memory, ram_bytes),
        ]
        if machine.disk is not None:
            found.append(ChannelCost("disk read", read_bytes * gpus / machine.disk.read, read_bytes))
            found.append(ChannelCost("disk write", write_bytes * gpus / machine.disk.write, write_bytes))
        return found + links

    def _links(self) -> list[ChannelCost]:
        """Return the connections between GPUs of a node and between nodes."""
        work, machine, mesh, one = self._work, self._machine, self._mesh, self.one
        found: list[ChannelCost] = []
        imbalance = work.experts.imbalance if work.experts is not None else 1.0
        to_node, to_others = self._exchanged_bytes()
        if mesh.gpus > 1:
            assert machine.links is not None and machine.links.gpu_gpu is not None
            gathered = sum(data.sent_in_node for data in self._all_data)
            blocking_s = (work.tensor_parallel_bytes + imbalance * to_node) / machine.links.gpu_gpu
            found.append(
                ChannelCost(
                    "between GPUs",
                    one * (gathered / machine.links.gpu_gpu + blocking_s),
                    one * (gathered + work.tensor_parallel_bytes + to_node),
                    blocking_s,
                )
            )
        if mesh.nodes > 1:
            assert machine.network is not None
            network, exchanged = machine.network, sum(data.sent_between_nodes for data in self._all_data)
            exchanges = work.experts.exchanges if work.experts is not None else 0
            blocking_s = imbalance * to_others * mesh.gpus / network.bandwidth
            blocking_s += exchanges * (mesh.expert_nodes - 1) * network.latency_s
            messages = work.working_sets * sum(data.messages_between_nodes for data in self.model_data)
            seconds = exchanged * mesh.gpus / network.bandwidth + messages * network.latency_s + blocking_s
            found.append(ChannelCost("between nodes", one * seconds, one * (exchanged + to_others), blocking_s))
            found.append(self._coordination(network))
        return found

    def _exchanged_bytes(self) -> tuple[float, float]:
        """Return the bytes of routed tokens that a process sends inside its node, and to other nodes."""
        work, mesh = self._work, self._mesh
        if work.experts is None or mesh.ep == 1:
            return 0.0, 0.0
        inside = (min(mesh.ep, mesh.gpus) - 1) / (mesh.ep - 1)
        return inside * work.experts.exchanged_bytes, (1 - inside) * work.experts.exchanged_bytes

    def _coordination(self, network: Network) -> ChannelCost:
        """Return the coordination steps: ring all-gathers of one message per process, one step before each gather.

        In lockstep there is one, which compares what processes did in the step.
        """
        mesh, one = self._mesh, self.one
        steps = 1 if mesh.lockstep else 2 * self._work.working_sets
        messages = steps * (mesh.processes - 1)
        return ChannelCost("coordination", one * (messages * network.latency_s), one * (messages * MESSAGE_BYTES))
