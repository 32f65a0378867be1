"""What moved, and what waiting for it took."""

from dataclasses import dataclass, fields, replace


@dataclass
class TransferCounters:
    """What moved. Bytes are of chunks and of offloaded activations alike."""

    h2d_bytes: int = 0
    """Bytes that came to the device, from the host or from disk."""
    d2h_bytes: int = 0
    """Bytes that left the device, to the host or to disk."""
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    gathered_bytes: int = 0
    """Bytes of parameters sent to other processes."""
    reduced_bytes: int = 0
    """Bytes of gradients sent to other processes."""
    rounds: int = 0
    """How often processes have agreed on what to communicate."""
    evictions: int = 0
    memory_retries: int = 0
    """How often memory was freed for a second try, since the device's allocator had none within the budget."""
    stall_s: float = 0.0

    def since(self, earlier: "TransferCounters") -> "TransferCounters":
        """The difference to an earlier reading."""
        return TransferCounters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> "TransferCounters":
        """A reading that will not change."""
        return replace(self)
