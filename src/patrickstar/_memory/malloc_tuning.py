"""Tuning of glibc's malloc: control over the freed memory that the process heap caches.

glibc maps each large block separately, and unmaps it when it is freed; smaller blocks come from a heap that caches
freed memory. The threshold between them grows up to 32 MiB as large blocks are freed. Then tensors reuse cached memory,
which is faster, and the process holds more memory than its tensors need.
"""

import ctypes
from functools import cache
from weakref import WeakSet

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
MIN_MMAP_THRESHOLD = 128 << 10
MAX_MMAP_THRESHOLD = 32 << 20
"""Initial threshold of glibc for mapped blocks, and the one that it reaches in a training process."""


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2. `hblks`: number of mapped blocks; `fordblks`: free bytes in the heap."""

    _fields_ = (
        ("_above", ctypes.c_size_t * 3),
        ("hblks", ctypes.c_size_t),
        ("_between", ctypes.c_size_t * 4),
        ("fordblks", ctypes.c_size_t),
        ("_below", ctypes.c_size_t),
    )


class MallocHeap:
    """glibc's process-wide heap; with another C library `set_caching` has no effect.

    Freed memory is cached unless a requester forbids it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._fillers: list[int] = []
        self._forbidding: WeakSet[object] = WeakSet()
        self._caching_forbidden = False
        self._supported = hasattr(self._libc, "mallopt") and hasattr(self._libc, "mallinfo2")
        if self._supported:
            self._libc.malloc.restype, self._libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            self._libc.free.restype, self._libc.free.argtypes = None, [ctypes.c_void_p]
            self._libc.mallinfo2.restype, self._libc.mallinfo2.argtypes = _Info, []
            # If another allocator was preloaded, glibc's statistics describe an unused heap.
            self._supported = self._allocate_in_heap(2 * MAX_MMAP_THRESHOLD) is None

    @property
    def caching(self) -> bool:
        return not self._caching_forbidden

    def trim(self) -> None:
        """Return cached memory to the system, if the C library supports it."""
        if hasattr(self._libc, "malloc_trim"):
            self._libc.malloc_trim(0)

    def set_caching(self, allowed: bool, requester: object) -> None:
        """Allow or forbid, for one requester, that freed blocks of 128 KiB to 32 MiB are cached.

        Caching makes a step faster: the system zeroes every page that it maps, which was measured to take 15 to 35 % of
        a step on a CPU. A collected requester stops counting at the next call.
        """
        if allowed:
            self._forbidding.discard(requester)
        else:
            self._forbidding.add(requester)
        forbidden = len(self._forbidding) > 0
        if not self._supported or forbidden is self._caching_forbidden:
            return
        self._caching_forbidden = forbidden
        threshold = MIN_MMAP_THRESHOLD if forbidden else MAX_MMAP_THRESHOLD
        self._libc.mallopt(_MMAP_THRESHOLD, threshold)
        # glibc's own rule: free memory at the heap's end may reach twice the mmap threshold.
        self._libc.mallopt(_TRIM_THRESHOLD, 2 * threshold)
        if forbidden:
            self._fill_free_lists()
        else:
            while self._fillers:
                self._libc.free(self._fillers.pop())

    def _fill_free_lists(self) -> None:
        """Allocate the heap's free blocks without touching them, or a large block would be placed and cached there."""
        self.trim()
        size = MAX_MMAP_THRESHOLD
        free_bytes = self._libc.mallinfo2().fordblks
        while size >= MIN_MMAP_THRESHOLD:
            block = self._allocate_in_heap(size) if size <= free_bytes else None
            if block is None:
                size //= 2
            else:
                self._fillers.append(block)
                free_bytes -= size

    def _allocate_in_heap(self, size: int) -> int | None:
        """Allocate a block inside the heap; return None if it would be mapped separately."""
        mapped_before = self._libc.mallinfo2().hblks
        block: int | None = self._libc.malloc(size)
        if block is not None and self._libc.mallinfo2().hblks == mapped_before:
            return block
        self._libc.free(block)
        return None


@cache
def process_heap() -> MallocHeap:
    return MallocHeap()
