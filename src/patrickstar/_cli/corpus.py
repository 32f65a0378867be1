"""Text to train on: files and folders, read in one fixed order."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patrickstar.errors import DataError

# Not the standard library's own text: what was installed beside it, and its tests' data.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# A file whose first bytes hold a zero byte is taken for binary, as version control systems do.
_PROBE_BYTES = 8192


@dataclass(frozen=True)
class Corpus:
    """Text files in a fixed order; every file is one document."""

    name: str
    paths: tuple[Path, ...]

    def texts(self) -> Iterator[str]:
        """Each file's text, bytes that are not UTF-8 replaced. Raises DataError where a file can't be read."""
        for path in self.paths:
            yield _read(path).decode("utf-8", errors="replace")

    def digest(self) -> str:
        """A hash of the contents: equal texts have equal digests, wherever they lie."""
        total = hashlib.sha256()
        for path in self.paths:
            total.update(hashlib.sha256(_read(path)).digest())
        return total.hexdigest()


def standard_library() -> Corpus:
    """The ``.py`` sources of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = tuple(path for path in _walk(root, skipped=_NOT_LIBRARY) if path.suffix == ".py")
    if not paths:
        raise DataError(f"this Python has no library sources in {root}; give text with --data PATH")
    return Corpus(f"the Python standard library in {root}", paths)


def open_corpus(locations: Sequence[Path]) -> Corpus:
    """The text files among ``locations``: files as they are given, folders with all below them, hidden ones left out.

    Without a place it is the standard library. Raises DataError, naming the path, for one that is missing, empty or
    not text.
    """
    if not locations:
        return standard_library()
    paths: dict[Path, None] = {}  # a set that keeps its order: a file given twice is read once
    for place in locations:
        found = _text_files(place)
        if not any(path.stat().st_size for path in found):
            raise DataError(f"{place} holds no text; give --data a text file, or a folder with text files")
        paths.update(dict.fromkeys(found))
    return Corpus(", ".join(str(place) for place in locations), tuple(paths))


def _text_files(place: Path) -> list[Path]:
    if place.is_dir():
        return [path for path in _walk(place) if _is_text(path)]
    if not place.exists():
        raise DataError(f"there is no file or folder {place}; check --data")
    if not _is_text(place):
        raise DataError(f"{place} is not a text file; give --data text, or a folder with text files")
    return [place]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below ``root``, sorted; hidden files and folders, and folders named in ``skipped``, left out."""

    def refuse(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} can't be read: {error.strerror}") from error

    paths = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
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
