"""Trained parameters in their compute dtype: where all-gathers read them, and what that costs, linear in the shares."""

from dataclasses import dataclass

from patrickstar._perf_model.linear_program import Expression, Variables


@dataclass(frozen=True, eq=False)
class ShareVariables:
    """Shares of one class of parameters: variables of a linear program, each from 0 to 1."""

    retained: Expression
    """Parameters that stay on the device from forward to backward, and to the next forward."""
    resident: Expression
    """Parameters whose states are on the device, and which are updated there."""
    on_host: Expression
    """Parameters updated on the host."""
    streamed: Expression
    """Parameters whose states are copied to the device for the update."""
    refetched: Expression
    """Parameters that are updated on the device, and copied there again for the next forward."""
    in_ram: Expression
    """Parameters whose states are in host memory."""
    on_disk: Expression
    """Parameters whose states are on disk."""
    paged: Expression
    """Parameters that are stored on disk, too."""

    COUNT = 8

    @classmethod
    def of(cls, variables: Variables, first: int) -> "ShareVariables":
        """Return the shares whose first variable is number `first`."""
        return cls(*(variables[first + index] for index in range(cls.COUNT)))


@dataclass(frozen=True, eq=False)
class ParamPlacement:
    """Trained parameters in their compute dtype: bytes per tier, and bytes that the process transfers in a step.

    There is one replica: parameters are gathered from the processes that own and update them.

    Attributes:
        owned: Elements that the process owns and updates.
        node_owned: Elements that all processes of the node own.
        param_bytes: Bytes of an element.
    """

    shares: ShareVariables
    one: Expression
    owned: float
    node_owned: float
    param_bytes: float

    @property
    def limits(self) -> list[Expression]:
        """Expressions that must not be above zero."""
        shares = self.shares
        # Parameters are retained, resident or paged, at most one of them. Those that are updated on the device but not
        # retained there are fetched again for the next forward.
        return [
            shares.retained + shares.resident + shares.paged - self.one,
            shares.streamed - shares.retained - shares.refetched,
        ]

    @property
    def device_bytes(self) -> Expression:
        """Bytes on the device of the process."""
        return self.param_bytes * self.owned * (self.shares.retained + self.shares.resident)

    @property
    def host_bytes(self) -> Expression:
        """Bytes in the memory of the node."""
        return self.param_bytes * self.node_owned * (self._fetched - self.shares.paged)

    @property
    def disk_bytes(self) -> Expression:
        """Bytes on the disk of the node."""
        return self.param_bytes * self.node_owned * self.shares.paged

    @property
    def _fetched(self) -> Expression:
        """Share of the parameters that are fetched for backward."""
        return self.one - self.shares.retained - self.shares.resident

    @property
    def h2d_bytes(self) -> Expression:
        """Bytes copied to the device for gathers."""
        return self.param_bytes * self.owned * (self._fetched + self.shares.refetched)

    @property
    def d2h_bytes(self) -> Expression:
        """Bytes copied from the device after an exchange."""
        return 0 * self.one

    @property
    def ram_bytes(self) -> Expression:
        """Bytes read and written in host memory for these copies."""
        return self.param_bytes * self.owned * self._fetched

    @property
    def read_bytes(self) -> Expression:
        """Bytes read from disk."""
        return 2 * self.param_bytes * self.owned * self.shares.paged  # for forward and backward

    @property
    def write_bytes(self) -> Expression:
        """Bytes written to disk."""
        return self.param_bytes * self.owned * self.shares.paged


@dataclass(frozen=True, eq=False)
class ReplicaCopies(ParamPlacement):
    """Parameters of several replicas: each has a copy, of which each of its processes stores a part.

    The processes of a replica gather from its copy. An exchange between replicas renews it on the device, when forward
    first needs it after an update; what does not stay there is copied to the host, and fetched for backward.

    Attributes:
        copied, node_copied: Elements of the copy that the process, or all processes of the node, store.
    """

    copied: float
    node_copied: float

    @property
    def limits(self) -> list[Expression]:
        return [self.shares.retained + self.shares.paged - self.one]

    @property
    def device_bytes(self) -> Expression:
        return self.param_bytes * (self.copied * self.shares.retained + self.owned * self.shares.resident)

    @property
    def host_bytes(self) -> Expression:
        copy = self.node_copied * (self.one - self.shares.retained - self.shares.paged)
        return self.param_bytes * (copy + self.node_owned * (self.one - self.shares.resident))

    @property
    def disk_bytes(self) -> Expression:
        return self.param_bytes * self.node_copied * self.shares.paged

    @property
    def h2d_bytes(self) -> Expression:
        return self.param_bytes * self.copied * (self.one - self.shares.retained)

    @property
    def d2h_bytes(self) -> Expression:
        return self.h2d_bytes

    @property
    def ram_bytes(self) -> Expression:
        return self.h2d_bytes + self.d2h_bytes

    @property
    def read_bytes(self) -> Expression:
        return self.param_bytes * self.copied * self.shares.paged

    @property
    def write_bytes(self) -> Expression:
        return self.read_bytes
