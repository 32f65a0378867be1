"""Counters of transfers and of the time spent waiting for them."""

from dataclasses import dataclass, fields, replace


@dataclass
class TransferCounters:
    """Counters of one engine, as in `StepStats`. Bytes include chunks and offloaded activations."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    inter_replica_gathered_bytes: int = 0
    inter_replica_reduced_bytes: int = 0
    rounds: int = 0
    evictions: int = 0
    memory_retries: int = 0
    stall_s: float = 0.0
    speculated: int = 0
    speculation_hits: int = 0

    def since(self, earlier: "TransferCounters") -> "TransferCounters":
        return TransferCounters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> "TransferCounters":
        return replace(self)
