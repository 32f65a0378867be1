"""The heap of the process: what the C library keeps of memory that was freed.

glibc takes large blocks from the system one by one, and gives each back when it is freed; smaller ones come from a heap
that keeps what was freed. What is large grows by itself up to 32 MiB as such blocks are freed. Then tensors are made in
memory that is already there, which is faster, and the process holds more than its tensors take.
"""

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt: see its manual page."""
LARGE_AT_FIRST = 128 << 10
LARGE_AT_MOST = 32 << 20
"""What glibc calls large when a process begins, and what it ends up with in one that trains."""


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2. `hblks`: how many blocks came from the system one by one."""

    _fields_ = (
        ("_above", ctypes.c_size_t * 3),
        ("hblks", ctypes.c_size_t),
        ("_below", ctypes.c_size_t * 6),
    )


class Heap:
    """glibc's. There is one in a process; under another C library nothing changes."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._libc = libc if all(hasattr(libc, name) for name in ("malloc_trim", "mallopt", "mallinfo2")) else None
        self._plugs: list[int] = []
        self._keeps: bool | None = None
        if self._libc is not None:
            self._libc.malloc.restype, self._libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            self._libc.free.restype, self._libc.free.argtypes = None, [ctypes.c_void_p]
            self._libc.mallinfo2.restype, self._libc.mallinfo2.argtypes = _Info, []

    def trim(self) -> None:
        """Give what is kept back to the system."""
        if self._libc is not None:
            self._libc.malloc_trim(0)

    def let_keep(self, allowed: bool) -> None:
        """Whether blocks of up to 32 MiB may be kept from now on when they are freed, or only those under 128 KiB.

        Kept ones make a step faster: the system clears every page that it hands out, which was measured to take 15 to
        35 % of a step on a CPU.
        """
        if self._libc is None or allowed is self._keeps:
            return
        self._keeps = allowed
        large = LARGE_AT_MOST if allowed else LARGE_AT_FIRST
        self._libc.mallopt(_MMAP_THRESHOLD, large)
        # glibc's own rule: what lies free at the heap's end may be twice what is large.
        self._libc.mallopt(_TRIM_THRESHOLD, 2 * large)
        if allowed:
            while self._plugs:
                self._libc.free(self._plugs.pop())
        else:
            self._plug()

    def _plug(self) -> None:
        """Take what lies free in the heap, without touching it: a large block would go there, and be kept when freed.

        What the heap has no place for, comes from the system by itself; so it is known when all places are taken.
        """
        assert self._libc is not None
        self.trim()
        size = LARGE_AT_MOST
        while size >= LARGE_AT_FIRST:
            before = self._libc.mallinfo2().hblks
            block = self._libc.malloc(size)
            if block and self._libc.mallinfo2().hblks == before:
                self._plugs.append(block)
                continue
            self._libc.free(block)
            size //= 2


@cache
def process_heap() -> Heap:
    """The one of this process."""
    return Heap()
