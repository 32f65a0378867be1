"""The heap of the process: what the C library keeps of memory that was freed.

glibc takes large blocks from the system one by one, and gives each back when it is freed; smaller ones come from a heap
that keeps what was freed. What is large grows by itself up to 32 MiB as such blocks are freed. Then tensors are made in
memory that is already there, which is faster, and the process holds more than its tensors take.
"""

import ctypes
from functools import cache
from weakref import WeakSet

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt: see its manual page."""
LARGE_AT_FIRST = 128 << 10
LARGE_AT_MOST = 32 << 20
"""What glibc calls large when a process begins, and what it ends up with in one that trains."""


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2. `hblks`: blocks that came from the system one by one; `fordblks`: free bytes."""

    _fields_ = (
        ("_above", ctypes.c_size_t * 3),
        ("hblks", ctypes.c_size_t),
        ("_between", ctypes.c_size_t * 4),
        ("fordblks", ctypes.c_size_t),
        ("_below", ctypes.c_size_t),
    )


class MallocHeap:
    """glibc's. There is one in a process, whoever looks at it; under another C library nothing changes.

    It keeps what is freed unless somebody forbids it, and as long as nobody does.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._plugs: list[int] = []
        self._no_caching: WeakSet[object] = WeakSet()
        self._plugged = False
        self._knows_plugs = hasattr(self._libc, "mallopt") and hasattr(self._libc, "mallinfo2")
        if self._knows_plugs:
            self._libc.malloc.restype, self._libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            self._libc.free.restype, self._libc.free.argtypes = None, [ctypes.c_void_p]
            self._libc.mallinfo2.restype, self._libc.mallinfo2.argtypes = _Info, []
            # Where another allocator was loaded before it, glibc's figures are of a heap that nobody uses.
            self._knows_plugs = self._take(2 * LARGE_AT_MOST) is None

    @property
    def caching(self) -> bool:
        """Whether freed memory may be kept."""
        return not self._plugged

    def trim(self) -> None:
        """Give what is kept back to the system, where the C library knows how."""
        if hasattr(self._libc, "malloc_trim"):
            self._libc.malloc_trim(0)

    def set_caching(self, allowed: bool, who: object) -> None:
        """Whether, as far as `who` goes, blocks of up to 32 MiB may be kept when they are freed, or none of 128 KiB.

        Kept ones make a step faster: the system clears every page that it hands out, which was measured to take 15 to
        35 % of a step on a CPU. Whoever forbade it and is gone no longer counts when somebody next says so.
        """
        if allowed:
            self._no_caching.discard(who)
        else:
            self._no_caching.add(who)
        forbidden = len(self._no_caching) > 0
        if not self._knows_plugs or forbidden is self._plugged:
            return
        self._plugged = forbidden
        large = LARGE_AT_FIRST if forbidden else LARGE_AT_MOST
        self._libc.mallopt(_MMAP_THRESHOLD, large)
        # glibc's own rule: what lies free at the heap's end may be twice what is large.
        self._libc.mallopt(_TRIM_THRESHOLD, 2 * large)
        if forbidden:
            self._fill_free_lists()
        else:
            while self._plugs:
                self._libc.free(self._plugs.pop())

    def _fill_free_lists(self) -> None:
        """Take what lies free in the heap, without touching it: a large block would go there, and be kept."""
        self.trim()
        size = LARGE_AT_MOST
        room = self._libc.mallinfo2().fordblks
        while size >= LARGE_AT_FIRST:
            block = self._take(size) if size <= room else None
            if block is None:
                size //= 2
            else:
                self._plugs.append(block)
                room -= size

    def _take(self, size: int) -> int | None:
        """A block of the heap; None where it has no place, so that one would come from the system by itself."""
        before = self._libc.mallinfo2().hblks
        block: int | None = self._libc.malloc(size)
        if block is not None and self._libc.mallinfo2().hblks == before:
            return block
        self._libc.free(block)
        return None


@cache
def process_heap() -> MallocHeap:
    """The one of this process."""
    return MallocHeap()
