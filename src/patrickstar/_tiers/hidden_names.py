"""Hidden names of swap files that checkpoints link to."""

import fcntl
import os
from pathlib import Path

PREFIX, SUFFIX = ".patrickstar-", ".chunks"


def remove_unlocked(directory: Path) -> None:
    """Remove the hidden names in a directory of files that no process writes; checkpoints that link to them remain."""
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # its process runs
            continue
        finally:
            os.close(fd)


def close(fd: int, path: Path | None) -> None:
    """Close a file, and remove its name if it has one."""
    if path is not None:
        path.unlink(missing_ok=True)
    os.close(fd)
