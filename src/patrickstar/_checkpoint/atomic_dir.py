"""A folder that becomes a checkpoint as a whole or not at all, and folders of several checkpoints."""

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from patrickstar._checkpoint.direct_writer import write_error
from patrickstar._checkpoint.manifest import Manifest, read_sequence, write_document
from patrickstar.errors import CheckpointError

_STEP = re.compile(r"step-(\d+)(-\d+)?")
_SUFFIX = ".patrickstar-partial"

# [Note: whole or not at all]
# A checkpoint is written into a hidden folder beside its place, whose lock is held meanwhile. When all files are on the
# disk the document is written; when that is on the disk too, the folder gets its name, and the folder above is
# synchronised. Whoever dies on the way leaves a hidden folder, which nobody reads, and whose lock is free: the next to
# write there removes it. What is deleted is hidden first. A checkpoint never takes the place of another.


class AtomicDir:
    """A folder that is being written, to become `target`. Raises CheckpointError if that is there, or can't be.

    over_empty: an empty folder that is there makes way.
    """

    def __init__(self, target: Path, *, over_empty: bool = False) -> None:
        self.target = target
        try:
            if target.exists() and not (over_empty and target.is_dir() and not any(target.iterdir())):
                raise CheckpointError(f"{target} exists, and is left as it is; save under another name")
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target.parent)
            self.path, self._lock = _locked_hidden_dir(target)
        except OSError as error:
            raise write_error(target, error, 0) from error

    def publish(self, document: Manifest, sequence: int) -> None:
        """Make a checkpoint of it. See [Note: whole or not at all]."""
        try:
            write_document(self.path, document, sequence)
        except OSError as error:
            raise write_error(self.target, error, 0) from error
        self.rename_into_place()

    def rename_into_place(self) -> None:
        """Give the folder its name, when all of its files are on the disk."""
        try:
            os.fsync(self._lock)
            self.path.rename(self.target)
            fsync_dir(self.target.parent)
        except OSError as error:
            raise write_error(self.target, error, 0) from error
        os.close(self._lock)

    def abandon(self) -> None:
        """Nothing comes of it."""
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


def _hidden_dir(path: Path) -> Path:
    """A new folder beside a path, under a name that nobody looks for."""
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent))
    made.chmod(0o755)
    return made


def _locked_hidden_dir(target: Path) -> tuple[Path, int]:
    """The same, and its lock, a descriptor. Whoever removes leftovers may take it for one before it is locked."""
    while True:
        path = _hidden_dir(target)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # some file systems of a network lock no folders, and leftovers stay there
            fcntl.flock(lock, fcntl.LOCK_SH)
        if path.exists():
            return path, lock
        os.close(lock)


def fsync_dir(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(folder: Path) -> None:
    """Remove what was being written or deleted by processes that have ended."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(_SUFFIX) and path.is_dir() and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def _in_use(path: Path) -> bool:
    """Whether a process that lives has the folder's lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # or gone
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def delete(path: Path) -> None:
    """Delete a checkpoint, which at no time is there in part. Raises OSError."""
    hidden = _hidden_dir(path)
    path.rename(hidden)  # an empty folder makes way
    shutil.rmtree(hidden)


def complete(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, each with its number in the order in which they were written, the oldest first."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            if _STEP.fullmatch(path.name):
                with suppress(CheckpointError):  # what is none, or a newer version's
                    found.append((read_sequence(path), path))
    return sorted(found)


def free_name(folder: Path, step: int) -> Path:
    """Where a checkpoint of a step can go: an earlier one of the same step stays."""
    path, again = folder / f"step-{step}", 1
    while path.exists():
        again += 1
        path = folder / f"step-{step}-{again}"
    return path
