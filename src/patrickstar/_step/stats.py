"""Statistics of optimizer steps, in bytes and seconds."""

import warnings
from dataclasses import asdict, dataclass, field
from operator import add
from typing import Any

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._tiers.transfer_counters import TransferCounters

STOCKS = ("disk_bytes", "reserved_bytes", "inactive_split_bytes")
"""Statistics of allocated bytes, of which a period has the maximum, as of the peaks."""


@dataclass(frozen=True)
class StepStats:
    """Statistics of this process: of one optimizer step, or of all (peaks are maxima, loss_scale is the last)."""

    steps: int = 0
    """Number of optimizer steps, including those with an overflow."""
    overflows: int = 0
    """Steps skipped because fp16 gradients were not finite; they change only the loss scale."""
    loss_scale: float = 1.0
    """Loss scale after the step; 1.0 without fp16."""
    device_peak_model_bytes: int = 0
    """Peak of the chunks on the device."""
    device_peak_non_model_bytes: int = 0
    """Peak of other memory on the device: activations, temporaries, workspaces."""
    host_peak_model_bytes: int = 0
    """Peak of the chunks on the host."""
    host_peak_non_model_bytes: int = 0
    """Peak of other managed memory on the host: staging buffers, offloaded activations."""
    library_resident_peak_bytes: int = 0
    """Resident memory of the process beside tensors and chunks, at the end of the step: libraries and their caches,
    Python, the heap's own. No budget counts it. 0 with a GPU."""
    disk_bytes: int = 0
    """Bytes of the swap file that are allocated to chunks."""
    h2d_bytes: int = 0
    """Bytes copied to the device, from the host or from disk."""
    d2h_bytes: int = 0
    """Bytes copied from the device, to the host or to disk."""
    disk_read_bytes: int = 0
    """Bytes read from the swap file."""
    disk_write_bytes: int = 0
    """Bytes written to the swap file."""
    gathered_bytes: int = 0
    """Bytes of parameters that this process sent to others."""
    reduced_bytes: int = 0
    """Bytes of gradients that this process sent to others."""
    inter_replica_gathered_bytes: int = 0
    """Part of `gathered_bytes` that was sent to other replicas, if the mesh has a replicate dimension."""
    inter_replica_reduced_bytes: int = 0
    """Part of `reduced_bytes` that was sent to other replicas."""
    rounds: int = 0
    """Coordination steps, in which the processes negotiate the next collectives."""
    evictions: int = 0
    """Chunks evicted from the device."""
    memory_retries: int = 0
    """Failed device allocations within the budget that were retried after an eviction."""
    stall_s: float = 0.0
    """Seconds spent waiting for transfers."""
    speculated: int = 0
    """Chunks that were updated during backward, before the step decided on clipping, loss scale and options."""
    speculation_hits: int = 0
    """Number of these chunks whose update the step confirmed; the others were updated again."""
    host_peak_speculative_bytes: int = 0
    """Peak of the host memory of such updates. It is released when anything else needs it."""
    staleness: float = 0.0
    """Number of updates that the parameters of the step's forward did not contain yet, as a mean over their elements
    and over steps: 0 unless `ps.Config(update=...)` delays updates."""
    peak_staleness: int = 0
    """Largest such number of any parameter."""
    reserved_bytes: int = 0
    """GPU memory reserved by the caching allocator at the end of the step, in use or not; 0 on a CPU."""
    inactive_split_bytes: int = 0
    """Part of `reserved_bytes` lost to fragmentation: unused parts of split segments; 0 on a CPU."""
    allocator_retries: int = 0
    """Failed allocations that the caching allocator retried after it freed its cache; 0 on a CPU."""

    def plus(self, later: "StepStats") -> "StepStats":
        """Return the statistics of this period and a later one together.

        Args:
            later: Statistics of the steps after these.

        Returns:
            Sums of counts, bytes and seconds; maxima of peaks and of allocated bytes; the later loss scale; the mean
            staleness.
        """
        values: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            combine = max if "peak" in name or name in STOCKS else add
            values[name] = combine(getattr(self, name), getattr(later, name))
        steps = self.steps * self.staleness + later.steps * later.staleness
        values |= {"loss_scale": later.loss_scale, "staleness": steps / max(1, self.steps + later.steps)}
        return StepStats(**values)


@dataclass
class Stats:
    """Statistics of the last step and of all steps."""

    last: StepStats = StepStats()
    total: StepStats = StepStats()
    _mark: TransferCounters = field(default_factory=TransferCounters)
    _retries: int = 0
    """Retries of the caching allocator before the current step."""
    _warned: bool = False

    def close_step(
        self,
        manager: ChunkManager,
        overflow: bool,
        loss_scale: float,
        non_model_peak: int,
        staleness: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Read the manager's counters at the end of a step, and reset its peaks."""
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
            host_peak_speculative_bytes=manager.host_tier.spare_peak,
            library_resident_peak_bytes=manager.hardware.library_resident_bytes(manager.cache.resident_bytes),
            disk_bytes=manager.disk_tier.file.used_bytes if manager.disk_tier is not None else 0,
            **asdict(moved),
            staleness=staleness[0],
            peak_staleness=staleness[1],
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
                f"the device had no memory left {retries} times in this step, although the engine kept its budget of "
                f"{manager.device_tier.budget_bytes} bytes: {allocator}. Each time, the allocator waits for all "
                f"kernels and frees its cache, which is slow if it happens in every step. Lower device_memory if other "
                f"programs use this device, raise it if none does, or set "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is set to something else",
                stacklevel=2,
            )
