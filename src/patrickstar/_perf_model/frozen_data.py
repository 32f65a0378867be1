"""Frozen parameters of one process: bytes per tier and transfers, linear in shares. They are only read."""

from dataclasses import dataclass

from patrickstar._perf_model.collective_costs import GATHERS, shard_bytes
from patrickstar._perf_model.linear_program import Expression, Solution, Variables
from patrickstar._perf_model.mesh import DataParallelGroup


@dataclass(frozen=True)
class FrozenShares:
    """Placement of a process's frozen parameters; each share is from 0 to 1, and the rest is in host memory."""

    retained: float
    """Frozen parameters that stay on the device."""
    paged: float
    """Frozen parameters that are on disk."""


class FrozenData:
    """Frozen parameters, as operators read them.

    What does not stay on the device is copied there for forward and again for backward, and never back.

    Attributes:
        nbytes: Bytes that the process stores on all tiers.
    """

    COUNT = 2
    """Number of variables of the linear program."""

    def __init__(self, all_bytes: int, group: DataParallelGroup, gpus: int, variables: Variables, first: int) -> None:
        self._all_bytes, self._group, self._gpus, self._first = all_bytes, group, gpus, first
        self._one, self._retained, self._paged = variables.one, variables[first], variables[first + 1]
        self._copy_bytes = all_bytes / group.shards
        own_bytes = self._copy_bytes / group.replicas
        # As of trained parameters: with several replicas a process stores its shard, and a part of its replica's copy.
        self._own_bytes = own_bytes if group.replicas > 1 else 0.0
        self.nbytes = self._copy_bytes + self._own_bytes

    @property
    def limits(self) -> list[Expression]:
        """Expressions that must not be above zero."""
        return [self._retained + self._paged - self._one]

    @property
    def device_bytes(self) -> Expression:
        """Bytes on the device of the process."""
        return self._copy_bytes * self._retained

    @property
    def host_bytes(self) -> Expression:
        """Bytes in the memory of the node."""
        copies = self._copy_bytes * (self._one - self._retained - self._paged)
        return self._gpus * (copies + self._own_bytes * self._one)

    @property
    def disk_bytes(self) -> Expression:
        """Bytes on the disk of the node."""
        return self._gpus * self._copy_bytes * self._paged

    @property
    def h2d_bytes(self) -> Expression:
        """Bytes that the process copies to the device, for forward and for backward."""
        return 2 * self._copy_bytes * (self._one - self._retained)

    @property
    def ram_bytes(self) -> Expression:
        """Bytes that the process reads in host memory, except for the disk."""
        return self.h2d_bytes

    @property
    def read_bytes(self) -> Expression:
        """Bytes that the process reads from disk, for forward and for backward."""
        return 2 * self._copy_bytes * self._paged

    @property
    def sent_in_node(self) -> float:
        """Bytes that the process sends to others of its node, which gather what it stores."""
        return self._gathered_bytes - self.sent_between_nodes

    @property
    def sent_between_nodes(self) -> float:
        """Bytes that the process sends to other nodes of its replica: one link of each node's part of a ring leaves."""
        group = self._group
        return self._gathered_bytes * group.nodes / group.shards if group.nodes > 1 else 0.0

    @property
    def _gathered_bytes(self) -> float:
        """Bytes sent in the gathers of a step; there is no gradient to reduce."""
        return shard_bytes(self._all_bytes, self._group.shards, GATHERS - 1, itemsize=1)

    def shares(self, solution: Solution) -> FrozenShares:
        """Return the shares of a solution."""
        return FrozenShares(float(solution[self._first]), float(solution[self._first + 1]))
