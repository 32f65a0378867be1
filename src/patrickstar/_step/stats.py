"""What a step cost, in bytes and seconds."""

import warnings
from dataclasses import dataclass, field

from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.transfer_counters import TransferCounters


@dataclass(frozen=True)
class StepStats:
    """One optimizer step, or all of them: peaks are maxima, the rest are sums."""

    steps: int = 0
    overflows: int = 0
    """Steps that changed nothing but the loss scale, since gradients were not finite with fp16."""
    loss_scale: float = 1.0
    device_peak_model_bytes: int = 0
    device_peak_non_model_bytes: int = 0
    host_peak_model_bytes: int = 0
    host_peak_non_model_bytes: int = 0
    disk_bytes: int = 0
    """Bytes that chunks have a place for on disk."""
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    gathered_bytes: int = 0
    """Bytes of parameters that this process sent to others."""
    reduced_bytes: int = 0
    """Bytes of gradients that this process sent to others."""
    rounds: int = 0
    """How often the processes agreed on what to communicate."""
    evictions: int = 0
    memory_retries: int = 0
    """How often the device's allocator had no memory within the budget; chunks were evicted for a second try."""
    stall_s: float = 0.0
    reserved_bytes: int = 0
    """Memory that the allocator held of a GPU when the step ended, in use or not; 0 on a CPU, as are the next two."""
    inactive_split_bytes: int = 0
    """Free parts of segments in use, part of `reserved_bytes`: the cost of fragmentation."""
    allocator_retries: int = 0
    """How often the allocator found no memory, freed what it cached, and tried again."""

    def plus(self, later: "StepStats") -> "StepStats":
        """Both together."""
        return StepStats(
            steps=self.steps + later.steps,
            overflows=self.overflows + later.overflows,
            loss_scale=later.loss_scale,
            device_peak_model_bytes=max(self.device_peak_model_bytes, later.device_peak_model_bytes),
            device_peak_non_model_bytes=max(self.device_peak_non_model_bytes, later.device_peak_non_model_bytes),
            host_peak_model_bytes=max(self.host_peak_model_bytes, later.host_peak_model_bytes),
            host_peak_non_model_bytes=max(self.host_peak_non_model_bytes, later.host_peak_non_model_bytes),
            disk_bytes=max(self.disk_bytes, later.disk_bytes),
            h2d_bytes=self.h2d_bytes + later.h2d_bytes,
            d2h_bytes=self.d2h_bytes + later.d2h_bytes,
            disk_read_bytes=self.disk_read_bytes + later.disk_read_bytes,
            disk_write_bytes=self.disk_write_bytes + later.disk_write_bytes,
            gathered_bytes=self.gathered_bytes + later.gathered_bytes,
            reduced_bytes=self.reduced_bytes + later.reduced_bytes,
            rounds=self.rounds + later.rounds,
            evictions=self.evictions + later.evictions,
            memory_retries=self.memory_retries + later.memory_retries,
            stall_s=self.stall_s + later.stall_s,
            reserved_bytes=max(self.reserved_bytes, later.reserved_bytes),
            inactive_split_bytes=max(self.inactive_split_bytes, later.inactive_split_bytes),
            allocator_retries=self.allocator_retries + later.allocator_retries,
        )


@dataclass
class Stats:
    """Per step and in total."""

    last: StepStats = StepStats()
    total: StepStats = StepStats()
    _mark: TransferCounters = field(default_factory=TransferCounters)
    _retries: int = 0
    """The allocator's retries before the current step."""
    _warned: bool = False

    def close_step(self, manager: ChunkManager, overflow: bool, loss_scale: float, non_model_peak: int) -> None:
        """Read the manager's counters at the end of a step, and start its peaks anew."""
        moved = manager.counters.since(self._mark)
        self._mark = manager.counters.copy()
        allocator = manager.hardware.allocator_stats()
        retries, self._retries = allocator.retries - self._retries, allocator.retries
        self.last = StepStats(
            steps=1,
            overflows=int(overflow),
            loss_scale=loss_scale,
            device_peak_model_bytes=manager.device_tier.peak,
            device_peak_non_model_bytes=non_model_peak,
            host_peak_model_bytes=manager.host_tier.peak,
            host_peak_non_model_bytes=manager.host_tier.other_peak,
            disk_bytes=manager.disk_tier.file.used_bytes if manager.disk_tier is not None else 0,
            h2d_bytes=moved.h2d_bytes,
            d2h_bytes=moved.d2h_bytes,
            disk_read_bytes=moved.disk_read_bytes,
            disk_write_bytes=moved.disk_write_bytes,
            gathered_bytes=moved.gathered_bytes,
            reduced_bytes=moved.reduced_bytes,
            rounds=moved.rounds,
            evictions=moved.evictions,
            memory_retries=moved.memory_retries,
            stall_s=moved.stall_s,
            reserved_bytes=allocator.reserved_bytes,
            inactive_split_bytes=allocator.inactive_split_bytes,
            allocator_retries=retries,
        )
        self.total = self.total.plus(self.last)
        manager.device_tier.reset_peak()
        manager.host_tier.reset_peaks()
        if retries and not self._warned:
            self._warned = True
            warnings.warn(
                f"the device had no memory left {retries} times in this step, although the budget of "
                f"{manager.device_tier.budget_bytes} bytes was kept: {allocator}. Each time it waits for "
                f"all kernels and "
                f"frees its cache, which is slow. Lower device_memory, end other programs on this device, or set "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is set to something else",
                stacklevel=2,
            )
