"""Device tier: device memory of chunks, and its budget."""

from patrickstar._hardware.memory_meter import Meter
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.timeline import Timeline

BLOCK_BYTES = 512
"""Blocks of an accelerator's caching allocator are multiples of this."""


def _rounding_bytes(chunk: Chunk) -> int:
    return -chunk.nbytes % BLOCK_BYTES


class DeviceTier:
    """Device memory of chunks, under a budget shared with non-model data."""

    def __init__(self, hardware: Hardware, budget_bytes: int, poison: bool) -> None:
        self.device = hardware.device
        self.budget_bytes = budget_bytes
        self.poison = poison
        self.page_pool = hardware.page_pool()
        """Holds the freed pages of chunks for the next allocation."""
        self.non_model_bytes = 0
        """Bytes of non-model data at the current moment, as far as known."""
        self.soft_limit_bytes = budget_bytes
        """Part of the budget to fill while non-model data may still grow."""
        self.fragmentation = NO_FRAGMENTATION
        """Fragmentation of the device's allocator. See [Note: reserved memory]."""
        self.used = 0
        self.rounding_bytes = 0
        """Bytes by which the allocator would round up the chunks that have no memory. They count as non-model data, so
        that these do not change when chunks come and go."""
        self.peak = 0
        self.allocations = 0
        """Number of allocations and releases of chunk memory."""
        self._meter: Meter | None = None
        self.moved: set[Chunk] = set()
        """Chunks whose memory was allocated, freed or moved since their Parameters were pointed at it."""
        self.timeline: Timeline | None = None
        """Recorder of the step, if it is recorded."""

    @property
    def chunkable_bytes(self) -> int:
        """Part of the budget left for chunks at the current moment."""
        return self.budget_bytes - self.non_model_bytes

    @property
    def free_bytes(self) -> int:
        """Part of the budget that no chunk uses."""
        return self.budget_bytes - self.used

    @property
    def soft_chunkable_bytes(self) -> int:
        """Part of the soft limit left for chunks at the current moment."""
        return min(self.soft_limit_bytes, self.budget_bytes) - self.non_model_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of machine or GPU memory that the tier uses, with unused pages of the pool."""
        return self.used if self.page_pool is None else self.page_pool.mapped_bytes

    def more_budget_bytes(self, short_bytes: int) -> int:
        """Return the bytes by which the budget has to be raised so that `short_bytes` more of it are planned."""
        planned = self.fragmentation.planned_bytes(self.budget_bytes)
        return self.fragmentation.budget_bytes(planned + short_bytes) - self.budget_bytes

    def limit_tensors(self, meter: Meter) -> None:
        """Limit tensors, and freed memory that their allocator caches, to what chunks leave of the budget, from now on.

        Cached memory is no part of any plan: it is freed before the budget would be exceeded.
        """
        self._meter = meter
        self._limit_tensors()

    def _limit_tensors(self, more_bytes: int = 0) -> None:
        if self._meter is not None:
            self._meter.limit(self.budget_bytes - self.resident_bytes - more_bytes)

    def new(self, kind: str, index: int, numel: int, dtype: str) -> Chunk:
        """Create a chunk for this device, with no memory on any tier yet."""
        chunk = Chunk(kind, index, numel, dtype, self.device, self.page_pool)
        self.rounding_bytes += _rounding_bytes(chunk)
        return chunk

    def allocate(self, chunk: Chunk) -> None:
        """Allocate memory for a chunk; the caller has made room. Its content is undefined."""
        if self.page_pool is None:
            self._limit_tensors(chunk.nbytes)
        elif (new_bytes := chunk.nbytes - self.page_pool.parked_bytes) > 0:  # beside the pages that no chunk uses
            self._limit_tensors(new_bytes)
        chunk.allocate_device()
        self.moved.add(chunk)
        self.used += chunk.nbytes
        self.rounding_bytes -= _rounding_bytes(chunk)
        self.allocations += 1
        self.peak = max(self.peak, self.used)
        if self.timeline is not None:
            self.timeline.allocated(chunk, Tier.DEVICE)

    def free(self, chunk: Chunk) -> None:
        chunk.device.settle(move=True)
        chunk.free_device(self.poison)
        self.moved.add(chunk)
        self.used -= chunk.nbytes
        self.rounding_bytes += _rounding_bytes(chunk)
        self.allocations += 1
        if self.page_pool is None:  # else its pages stay
            self._limit_tensors()
        if self.timeline is not None:
            self.timeline.freed(chunk, Tier.DEVICE)

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk without memory, which is removed."""
        self.rounding_bytes -= _rounding_bytes(chunk)

    def trim(self, limit_bytes: int) -> None:
        """Return unused pages to the system, down to `limit_bytes` for chunks and unused pages together."""
        if self.page_pool is not None and self.page_pool.parked_bytes > max(0, limit_bytes - self.used):
            self._trim(limit_bytes)

    def _trim(self, limit_bytes: int) -> None:
        assert self.page_pool is not None
        self.page_pool.trim(limit_bytes - self.used)
        self._limit_tensors()

    def note_non_model_bytes(self) -> None:
        """Note in the record of the step, if there is one, the non-model data, for which there is room now."""
        if self.timeline is not None:
            self.timeline.non_model_bytes(self.non_model_bytes, settled=True)

    def close(self) -> None:
        """Withdraw the limit of tensors."""
        if self._meter is not None:
            self._meter.close()

    def reset_peak(self) -> None:
        self.peak = self.used
