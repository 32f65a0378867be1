"""Training text from files and folders, in a fixed order."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patrickstar.errors import DataError

# Folders in the standard library's folder that are not its own sources: installed packages and tests.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# A file with a zero byte among its first bytes counts as binary, as in version control systems.
_PROBE_BYTES = 8192


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order; each file is one document."""

    name: str
    paths: tuple[Path, ...]

    def texts(self) -> Iterator[str]:
        """Yield the text of each file, with invalid UTF-8 replaced. Raise DataError for an unreadable file."""
        for path in self.paths:
            yield _read(path).decode("utf-8", errors="replace")

    def digest(self) -> str:
        """Return a hash of the contents, independent of paths."""
        total = hashlib.sha256()
        for path in self.paths:
            total.update(hashlib.sha256(_read(path)).digest())
        return total.hexdigest()


def standard_library() -> Corpus:
    """Return the ``.py`` sources of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = tuple(path for path in _walk(root, skipped=_NOT_LIBRARY) if path.suffix == ".py")
    if not paths:
        raise DataError(f"this Python has no library sources in {root}; provide text with --data PATH")
    return Corpus(f"the Python standard library in {root}", paths)


def open_corpus(locations: Sequence[Path]) -> Corpus:
    """Collect the given files, and all text files below the given folders except hidden ones.

    Without locations, return the standard library. Raise DataError for a location that is missing, empty or not text.
    """
    if not locations:
        return standard_library()
    paths: dict[Path, None] = {}  # an ordered set: a file given twice is read once
    for location in locations:
        files = _text_files(location)
        if not any(path.stat().st_size for path in files):
            raise DataError(f"{location} holds no text; pass --data a text file or a folder with text files")
        paths.update(dict.fromkeys(files))
    return Corpus(", ".join(str(location) for location in locations), tuple(paths))


def refuse_missing_text(location: Path) -> None:
    """Raise DataError if there is no file or folder."""
    if not location.exists():
        raise DataError(f"there is no file or folder {location}; check --data")


def _text_files(location: Path) -> list[Path]:
    if location.is_dir():
        return [path for path in _walk(location) if _is_text(path)]
    refuse_missing_text(location)
    if not _is_text(location):
        raise DataError(f"{location} is not a text file; pass --data a text file or a folder with text files")
    return [location]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Return the regular files below ``root``, sorted, except hidden ones and those in ``skipped`` folders."""

    def raise_data_error(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} can't be read: {error.strerror}") from error

    paths = []
    for folder, subfolders, names in os.walk(root, onerror=raise_data_error):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if path.is_file())


def _is_text(path: Path) -> bool:
    return path.is_file() and b"\0" not in _read(path, _PROBE_BYTES)


def _read(path: Path, nbytes: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
