"""Tensors as they lie in a safetensors file, of which any stretch of elements can be read by itself."""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from patrickstar._checkpoint.safetensors_file import DTYPES as FORMAT
from patrickstar.errors import ModelError

DTYPES = {
    name: dtype for dtype, name in FORMAT.items() if not dtype.is_complex and (dtype.itemsize > 1 or name[0] != "F")
}
"""Those of plain numbers, by the format's names. The others mean nothing without their scales, or are complex."""

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInFile:
    """One tensor of a file: its first byte there, and what it is. Elements lie in a row, the last dimension fastest."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(self.shape)

    def read_into(self, target: torch.Tensor, first: int) -> None:
        """Fill a flat tensor of the file's dtype with elements from `first` on; nothing else is read.

        Raises ModelError where the file ends before them, or can't be read.
        """
        left = target.view(torch.uint8).numpy().data
        at = self.offset_bytes + first * target.itemsize
        try:
            # Not mapped: pages of a mapping stay resident beside the copy.
            with open(self.file, "rb", buffering=0) as file:
                while left:
                    count = os.preadv(file.fileno(), [left], at)
                    if not count:
                        raise ModelError(f"{self.file} ends at byte {at}, in the middle of {self.key}; fetch it again")
                    left, at = left[count:], at + count
        except OSError as error:
            raise ModelError(f"{self.file} can't be read: {error}") from error


@dataclass(frozen=True)
class Source:
    """A value as files hold it: tensors of one dtype whose elements follow one another."""

    pieces: tuple[TensorInFile, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Its dtype, as the format names it."""
        return self.pieces[0].dtype

    def __str__(self) -> str:
        first, more = self.pieces[0], len(self.pieces) - 1
        others = f" and {more} more" if more else ""
        return f"{first.key}{others} ({self.dtype}, {list(self.shape)})"

    def read(self, first: int, numel: int) -> torch.Tensor:
        """`numel` of its elements from `first` on, in a row."""
        found = torch.empty(numel, dtype=DTYPES[self.dtype], device="cpu")
        at = 0  # where the piece begins
        for piece in self.pieces:
            begin, end = max(first, at), min(first + numel, at + piece.numel)
            if begin < end:
                piece.read_into(found[begin - first : end - first], begin - at)
            at += piece.numel
        return found


def read_header(file: Path) -> dict[str, TensorInFile]:
    """The tensors of a safetensors file, by key.

    Nothing is believed: no more is read or made than the file is long, and every tensor has to lie inside it. Raises
    ModelError, naming the file, where that is not so.
    """
    try:
        with open(file, "rb") as opened:
            length = os.fstat(opened.fileno()).st_size
            header_bytes = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            begin = _LENGTH_BYTES + header_bytes
            if length < _LENGTH_BYTES or header_bytes > _MOST_HEADER_BYTES or begin > length:
                raise ModelError(
                    f"{file} is no safetensors file, or is truncated: it has {length} bytes, and says that its header "
                    f"has {header_bytes}; fetch it again"
                )
            header = json.loads(opened.read(header_bytes).decode())
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        return {key: _stored(file, key, entry, begin, length) for key, entry in header.items()}
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} can't be read as safetensors: {error}") from error


def _stored(file: Path, key: str, entry: Any, begin: int, length: int) -> TensorInFile:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(end)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            stored = TensorInFile(key, file, dtype, tuple(shape), begin + first)
        case _:
            raise ValueError(f"it does not say what {key} is")
    if not 0 <= first <= end:
        raise ValueError(f"{key} begins at byte {first} and ends at {end}")
    if begin + end > length:
        raise ModelError(
            f"{file} is truncated: {key} ends at byte {begin + end}, and the file at {length}; fetch it again"
        )
    if dtype in DTYPES and end - first != stored.numel * DTYPES[dtype].itemsize:
        raise ValueError(f"{key} has {end - first} bytes, which are not {dtype} of shape {list(shape)}")
    return stored
