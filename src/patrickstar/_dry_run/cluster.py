"""Cluster of a dry run: which processes share a machine, and what communication between them takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from patrickstar._distributed.data_mesh import DataMesh
from patrickstar._dry_run.op_tracer import OpCost, OpCosts
from patrickstar._perf_model.machine_spec import Machine
from patrickstar.errors import ConfigError

COPIES_PER_BYTE = 4
"""Times that memory is accessed for a byte sent between processes of a CPU: the sender and the receiver read and write
it."""


@dataclass(frozen=True)
class Cluster:
    """Processes on machines of one kind, numbered machine by machine.

    Args:
        machine: Spec of the machines.
        processes: Number of processes: one per GPU, or all on one machine without GPUs.
        replicas: Number of replicas that they form, as in a mesh with a replicate dimension.

    Raises:
        ConfigError: The processes can't be divided so, or the spec lacks a rate.
    """

    machine: Machine
    processes: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        machine = self.machine
        if self.processes % self.replicas:
            raise ConfigError(f"{self.processes} processes can't be divided into {self.replicas} replicas")
        if self.processes % self.per_machine:
            raise ConfigError(
                f"{self.processes} processes do not fill machines of {self.per_machine} GPUs ({machine.name}): "
                f"simulate a multiple of {self.per_machine}"
            )
        if self.processes > self.per_machine and machine.network is None:
            raise ConfigError(
                f"the machine {machine.name} has GPUs for {self.per_machine} of {self.processes} processes, and no "
                f"[network] to other machines: simulate fewer processes, or use a machine file with a network"
            )
        if self.per_machine > 1 and machine.gpu is not None and (machine.links is None or not machine.links.gpu_gpu):
            raise ConfigError(f"the machine {machine.name} has no links.gpu_gpu, the rate between its GPUs")

    @property
    def per_machine(self) -> int:
        """Number of processes on each machine."""
        return self.processes if self.machine.gpu is None else min(self.processes, self.machine.gpu.count)

    @property
    def threads(self) -> int:
        """Threads that each process computes with on a CPU."""
        return max(1, self.machine.host.cores // self.per_machine)

    @property
    def slowdown(self) -> float:
        """Factor by which operators on a CPU are slower than with `threads` cores, since there are too few."""
        return max(1.0, self.per_machine * self.threads / self.machine.host.cores)

    @property
    def mesh(self) -> DataMesh:
        """Data-parallel mesh of all processes."""
        ranks = tuple(range(self.processes))
        return DataMesh((ranks,), ranks, self.replicas)

    @property
    def _rate_in_machine(self) -> float:
        """Bytes per second that each process of a machine sends to others on it, while all do."""
        if self.machine.gpu is None:
            return self.machine.host.memory_bandwidth / COPIES_PER_BYTE / self.per_machine
        assert self.machine.links is not None and self.machine.links.gpu_gpu is not None
        return self.machine.links.gpu_gpu

    def seconds(self, ranks: Sequence[int], nbytes: float) -> float:
        """Return the time of a ring collective in which each of these processes sends `nbytes`."""
        machines = {rank // self.per_machine for rank in ranks}
        if len(machines) == 1:
            return nbytes / self._rate_in_machine
        network, members = self.machine.network, len(ranks) / len(machines)
        assert network is not None, "checked by the constructor"
        # One link of the ring leaves each machine; its other processes have rings of their own with as many members.
        rate = network.bandwidth * members / self.per_machine
        if members > 1:
            rate = min(rate, self._rate_in_machine)
        return nbytes / rate + (len(machines) - 1) * network.latency_s

    @property
    def coordination_s(self) -> float:
        """Seconds of a coordination step: messages between machines, as in a ring of all processes."""
        network = self.machine.network
        if network is None or self.processes == self.per_machine:
            return 0.0
        return (self.processes - 1) * network.latency_s


def slowed_down(costs: OpCosts, factor: float) -> OpCosts:
    """Return a cost model whose operators take `factor` times as long."""
    if factor == 1:
        return costs
    known: dict[OpCost, OpCost] = {}  # equal costs stay one object, by which their first run is recognized

    def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        measured = costs(func, args, kwargs, out)
        return known.setdefault(measured, replace(measured, seconds=measured.seconds * factor))

    return cost
