"""Counters of transfers and of the time spent waiting for them."""

from dataclasses import dataclass, fields, replace


@dataclass
class TransferCounters:
    """Counters of one engine. Bytes include chunks and offloaded activations."""

    h2d_bytes: int = 0
    """Bytes copied to the device, from host or disk."""
    d2h_bytes: int = 0
    """Bytes copied from the device, to host or disk."""
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    gathered_bytes: int = 0
    """Bytes of parameters sent to other ranks."""
    reduced_bytes: int = 0
    """Bytes of gradients sent to other ranks."""
    inter_replica_gathered_bytes: int = 0
    """Part of `gathered_bytes` sent to other replicas."""
    inter_replica_reduced_bytes: int = 0
    """Part of `reduced_bytes` sent to other replicas."""
    rounds: int = 0
    """Number of coordination steps."""
    evictions: int = 0
    memory_retries: int = 0
    """Number of retries after an out-of-memory error of the device allocator within the budget."""
    stall_s: float = 0.0
    speculated: int = 0
    """Number of updates of chunks that backward had started, and that had begun if the step confirms them."""
    speculation_hits: int = 0
    """Number of those that the step confirmed."""

    def since(self, earlier: "TransferCounters") -> "TransferCounters":
        return TransferCounters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> "TransferCounters":
        return replace(self)
