"""Direct I/O between files and buffers, for the swap file and checkpoints."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

PAGE_BYTES = 4 * 1024**2
BLOCK_BYTES = 4096

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk."""
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
"""Errors of a file system that lacks a feature."""

_PUNCH_HOLE_AND_KEEP_SIZE = 3
"""Flags of fallocate(2), which Python's library lacks."""

Call = Callable[[int, Sequence[memoryview | mmap.mmap], int], int]
"""`os.preadv` or `os.pwritev`."""

# [Note: direct I/O]
# Memory of the page cache is outside every budget, and errors of its delayed writes are reported to no caller. So pages
# are transferred directly (O_DIRECT) between the disk and the caller's buffer. This requires alignment: offsets,
# lengths and addresses are multiples of BLOCK_BYTES, and the last page of an extent is transferred up to the end of its
# last block. The flag is set after the file has been created: some file systems refuse it in open(), and leave the file
# behind.


def try_direct(fd: int, *calls: Call) -> bool:
    """Set O_DIRECT and transfer one block with each call; return False, with the flag unset, if this is refused."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        for call in calls:
            call(fd, [block], 0)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def reserve(fd: int, start: int, nbytes: int) -> bool:
    """Reserve disk space for a file; return False if the file system can't, and a write has to find a full disk."""
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    return True


def punch_hole(fd: int, start: int, nbytes: int) -> bool:
    """Free the disk space of a part of a file, which then reads as zeros; return False if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.fallocate(fd, _PUNCH_HOLE_AND_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(nbytes))


def transfer_all(call: Call, fd: int, buffer: memoryview, offset: int, unit: int = 1) -> int:
    """Transfer a whole buffer, in parts if the system does so; return the number of bytes, fewer at the end of a file.

    A part that ends within a `unit` is repeated from the start of that unit.
    """
    done = 0
    while done < len(buffer):
        moved = call(fd, [buffer[done:]], offset + done)
        moved -= moved % unit
        if not moved:
            break
        done += moved
    return done


def free_bytes(path: int | Path) -> int:
    """Return the free bytes of the file system of a path or descriptor. Raises OSError."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize
