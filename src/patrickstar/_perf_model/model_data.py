"""Model data of one class of parameters, dense ones or experts: bytes per tier and transfers, linear in shares."""

from dataclasses import dataclass

from patrickstar._perf_model.collective_costs import GATHERS, replica_bytes, shard_bytes
from patrickstar._perf_model.linear_program import SLACK, Expression, Solution, Variables
from patrickstar._perf_model.mesh import DataParallelGroup
from patrickstar._perf_model.param_placement import ParamPlacement, ReplicaCopies, ShareVariables
from patrickstar._perf_model.workload import Workload


@dataclass(frozen=True)
class Shares:
    """Placement of a process's model data, and where it is updated; each share is from 0 to 1."""

    retained: float
    """Parameters that stay on the device from forward to backward, and to the next forward."""
    resident: float
    """Parameters whose states are on the device, and which are updated there."""
    on_host: float
    """Parameters updated on the host; the states of the rest are streamed to the device for the update."""
    in_ram: float
    """Part of the states outside the device that is in host memory; the rest is on disk."""
    paged: float
    """Parameters that are stored on disk, too."""


class ModelDataShare:
    """Parameters and optimizer states of one class, in one process and in its node.

    Attributes:
        numel: Elements that the process computes with.
        owned: Elements that it owns: it stores and updates their states.
        copied: Elements of its replica's copy of the parameters that it stores; 0 if there is one replica.
        param_bytes: Bytes of an element in the compute dtype.
        state_bytes: Bytes of its states and its master.
    """

    def __init__(
        self, numel: int, work: Workload, group: DataParallelGroup, gpus: int, variables: Variables, first: int
    ) -> None:
        self.numel, self._group, self._first = numel, group, first
        self.param_bytes, self.state_bytes = work.param_bytes, work.state_bytes
        self._bytes_of_update = work.update_bytes
        self._one, self._shares = variables.one, ShareVariables.of(variables, first)
        self.owned = numel / (group.shards * group.replicas)
        self._node_owned = gpus * numel / (group.shards * group.replicas)
        self.copied = numel / group.shards if group.replicas > 1 else 0.0
        own = self._shares, self._one, self.owned, self._node_owned, work.param_bytes
        self._params = ReplicaCopies(*own, self.copied, gpus * self.copied) if self.copied else ParamPlacement(*own)

    @property
    def nbytes(self) -> float:
        """Bytes on all tiers: 14 (12 with split masters) per owned element in 16 bits, and 2 of the replica's copy."""
        return (self.param_bytes + self.state_bytes) * self.owned + self.param_bytes * self.copied

    @property
    def node_states_bytes(self) -> float:
        """Bytes of the optimizer states of the node."""
        return self.state_bytes * self._node_owned

    @property
    def equalities(self) -> list[Expression]:
        """Expressions that are zero: each parameter is updated on some tier, and each state is stored on some tier."""
        shares = self._shares
        return [
            shares.resident + shares.on_host + shares.streamed - self._one,
            shares.resident + shares.in_ram + shares.on_disk - self._one,
        ]

    @property
    def limits(self) -> list[Expression]:
        """Expressions that must not be above zero."""
        return self._params.limits

    @property
    def device_bytes(self) -> Expression:
        """Bytes on the device of the process."""
        return self.state_bytes * self.owned * self._shares.resident + self._params.device_bytes

    @property
    def host_bytes(self) -> Expression:
        """Bytes in the memory of the node."""
        return self.state_bytes * self._node_owned * self._shares.in_ram + self._params.host_bytes

    @property
    def disk_bytes(self) -> Expression:
        """Bytes on the disk of the node."""
        return self.states_on_disk_bytes + self._params.disk_bytes

    @property
    def states_on_disk_bytes(self) -> Expression:
        """Bytes of the states on the disk of the node."""
        return self.node_states_bytes * self._shares.on_disk

    @property
    def _update_bytes(self) -> Expression:
        """Gradients or parameters of updates on the host, and streamed states, in one direction."""
        return self.owned * (self.param_bytes * self._shares.on_host + self.state_bytes * self._shares.streamed)

    @property
    def h2d_bytes(self) -> Expression:
        """Bytes that the process copies to the device."""
        return self._update_bytes + self._params.h2d_bytes

    @property
    def d2h_bytes(self) -> Expression:
        """Bytes that the process copies from the device."""
        return self._update_bytes + self._params.d2h_bytes

    def read_bytes(self, lock_free: bool) -> Expression:
        """Return the bytes that the process reads from disk; with lock-free updates without states."""
        states = (0 if lock_free else self.state_bytes) * self.owned * self._shares.on_disk
        return states + self._params.read_bytes

    def write_bytes(self, lock_free: bool) -> Expression:
        """Return the bytes that the process writes to disk; with lock-free updates without states."""
        states = (0 if lock_free else self.state_bytes) * self.owned * self._shares.on_disk
        return states + self._params.write_bytes

    @property
    def device_update_bytes(self) -> Expression:
        """Bytes that updates on the device read and write there."""
        return self._bytes_of_update * self.owned * (self._shares.resident + self._shares.streamed)

    @property
    def ram_bytes(self) -> Expression:
        """Bytes that the process reads and writes in host memory, except for the disk."""
        update = self._bytes_of_update * self._shares.on_host + 2 * self.state_bytes * self._shares.streamed
        return self.owned * update + self._params.ram_bytes

    @property
    def sent_in_node(self) -> float:
        """Bytes that the process sends to others of its node."""
        return shard_bytes(self.numel, self._group.shards, itemsize=self.param_bytes) - self._sent_in_replica

    @property
    def sent_between_nodes(self) -> float:
        """Bytes that the process sends to other nodes: to other replicas, and those of its own that leave the node."""
        return replica_bytes(self.numel, self._group, itemsize=self.param_bytes) + self._sent_in_replica

    @property
    def _sent_in_replica(self) -> float:
        """Bytes sent to other nodes of the replica, on average: one link of each node's part of a ring leaves it."""
        group = self._group
        sent = shard_bytes(self.numel, group.shards, itemsize=self.param_bytes)
        return sent * group.nodes / group.shards if group.nodes > 1 else 0.0

    @property
    def messages_between_nodes(self) -> int:
        """Messages one after the other, to exchange and to gather one part of the parameters in rings of nodes."""
        return 2 * (self._group.replicas - 1) + (GATHERS + 1) * (self._group.nodes - 1)

    def shares(self, solution: Solution) -> Shares:
        """Return the shares of a solution."""
        retained, resident, on_host, _, _, in_ram, on_disk, paged = (
            float(solution[self._first + index]) for index in range(ShareVariables.COUNT)
        )
        off_device = in_ram + on_disk
        return Shares(retained, resident, on_host, in_ram / off_device if off_device > SLACK else 1.0, paged)
