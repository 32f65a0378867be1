"""Large blocks of CPU tensors in a dry run: which of them the allocator would find among freed ones."""

from bisect import bisect_left, insort

MAPPED_BYTES, WASTE, PAGE_BYTES, HEADER_BYTES = 128 << 10, 8, 4096, 64
"""As in `_hardware/cpp/cpu_allocator.cpp`: tensors from this size on have mapped blocks, which begin with a header, and
may be larger by a `WASTE`-th."""

# [Note: fresh pages]
# The system zeroes each page of a new block when it is first written, which takes longer than most operators on it. So
# the allocator keeps freed blocks, as far as the budget has room beside tensors and chunks. Operators are timed with
# such blocks for their results. In a step whose budget is full, most results are in new ones: a dry run follows the
# allocator block by block, and counts the pages.


class SimulatedBlocks:
    """Freed blocks that the allocator keeps, by size. See [Note: fresh pages]."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._limit_bytes = 0
        self._fresh_bytes = 0

    def limit(self, nbytes: int, live_bytes: int) -> None:
        """Keep no more than `nbytes` of live tensors and freed blocks together, from now on."""
        self._limit_bytes = nbytes
        self._trim(nbytes - live_bytes)

    def take(self, nbytes: int, live_bytes: int) -> int:
        """Allocate a block for a tensor of `nbytes`; return its size, or 0 if it is too small for one."""
        if nbytes < MAPPED_BYTES:
            return 0
        size = -(-(nbytes + HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES
        position = bisect_left(self._sizes, size)
        if position < len(self._sizes) and self._sizes[position] <= size + size // WASTE:
            return self._sizes.pop(position)
        self._fresh_bytes += size
        self._trim(self._limit_bytes - live_bytes - size)
        return size

    def free(self, size: int, live_bytes: int) -> None:
        """Free a block of a size that `take` has returned."""
        if size:
            insort(self._sizes, size)
            self._trim(self._limit_bytes - live_bytes)

    @property
    def cached_bytes(self) -> int:
        """Bytes of freed blocks."""
        return sum(self._sizes)

    def _trim(self, nbytes: int) -> None:
        while self._sizes and self.cached_bytes > nbytes:
            self._sizes.pop()

    def take_fresh(self) -> int:
        """Return the bytes of new blocks since the last call."""
        nbytes, self._fresh_bytes = self._fresh_bytes, 0
        return nbytes
