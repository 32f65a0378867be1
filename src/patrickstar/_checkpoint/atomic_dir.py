"""Atomic creation and deletion of checkpoint folders, and enumeration of the checkpoints in a folder."""

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from patrickstar._checkpoint.direct_writer import write_error
from patrickstar._checkpoint.manifest import Manifest, read_sequence, write_manifest
from patrickstar.errors import CheckpointError

_STEP = re.compile(r"step-(\d+)(-\d+)?")
_SUFFIX = ".patrickstar-partial"

# [Note: atomic checkpoints]
# A checkpoint is written to a hidden folder next to its final path; the writer holds a lock on that folder. After all
# files are synced to disk, the manifest is written and synced, the folder is renamed to its final name, and the parent
# folder is synced. A process that dies earlier leaves a hidden folder that no reader considers and whose lock is free;
# the next save in the same parent removes it. Deletion first renames to a hidden folder. A checkpoint never replaces
# another one.


class AtomicDir:
    """Hidden folder under construction that is renamed to `target`.

    Raises CheckpointError if `target` exists or cannot be created; with `over_empty`, an empty folder may exist.
    """

    def __init__(self, target: Path, *, over_empty: bool = False) -> None:
        self.target = target
        try:
            if target.exists() and not (over_empty and target.is_dir() and not any(target.iterdir())):
                raise CheckpointError(f"{target} already exists and was not changed; save under another name")
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target.parent)
            self.path, self._lock = _locked_hidden_dir(target)
        except OSError as error:
            raise write_error(target, error, 0) from error

    def publish(self, manifest: Manifest, sequence: int) -> None:
        """Write the manifest and rename the folder. See [Note: atomic checkpoints]."""
        try:
            write_manifest(self.path, manifest, sequence)
        except OSError as error:
            raise write_error(self.target, error, 0) from error
        self.rename_into_place()

    def rename_into_place(self) -> None:
        """Rename the folder to `target`; all of its files must be synced to disk."""
        try:
            os.fsync(self._lock)
            self.path.rename(self.target)
            fsync_dir(self.target.parent)
        except OSError as error:
            raise write_error(self.target, error, 0) from error
        os.close(self._lock)

    def abandon(self) -> None:
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


def _hidden_dir(path: Path) -> Path:
    """Create a hidden folder next to a path."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent))
    hidden.chmod(0o755)
    return hidden


def _locked_hidden_dir(target: Path) -> tuple[Path, int]:
    """Create a hidden folder; return it and the descriptor of its lock.

    Retries, since another process may remove the folder as a leftover before it is locked.
    """
    while True:
        path = _hidden_dir(target)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # some network file systems cannot lock folders; leftovers are never removed there
            fcntl.flock(lock, fcntl.LOCK_SH)
        if path.exists():
            return path, lock
        os.close(lock)


def fsync_dir(folder: Path) -> None:
    """Sync the directory entries of a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(folder: Path) -> None:
    """Remove hidden folders of saves and deletions whose processes have ended."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(_SUFFIX) and path.is_dir() and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def _in_use(path: Path) -> bool:
    """Return whether a running process holds the folder's lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # or already removed
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def delete(path: Path) -> None:
    """Delete a checkpoint; readers never see it in part. Raises OSError."""
    hidden = _hidden_dir(path)
    path.rename(hidden)  # rename(2) replaces an empty folder
    shutil.rmtree(hidden)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (sequence number, path) of the complete checkpoints in a folder, oldest first."""
    checkpoints = []
    if folder.is_dir():
        for path in folder.iterdir():
            if _STEP.fullmatch(path.name):
                with suppress(CheckpointError):  # not a checkpoint, or of a newer version
                    checkpoints.append((read_sequence(path), path))
    return sorted(checkpoints)


def free_name(folder: Path, step: int) -> Path:
    """Return an unused path for a checkpoint of a step; an earlier checkpoint of the step is kept."""
    path, count = folder / f"step-{step}", 1
    while path.exists():
        count += 1
        path = folder / f"step-{step}-{count}"
    return path
