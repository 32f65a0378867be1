"""Tensors of a local model folder and the files that hold them."""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from patrickstar._checkpoint.safetensors_file import DTYPES as FORMAT
from patrickstar._hardware.direct_io import transfer_all
from patrickstar.errors import ModelError

DTYPES = {
    name: dtype for dtype, name in FORMAT.items() if not dtype.is_complex and (dtype.itemsize > 1 or name[0] != "F")
}
"""Supported dtypes by the format's names: no complex numbers, and no 8-bit floats, which need scales."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInFile:
    """Tensor of a file at a byte offset; its elements are contiguous and row-major."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def read_into(self, target: torch.Tensor, first: int) -> None:
        """Fill a flat tensor of the file's dtype with elements from `first`; read nothing else.

        Raises ModelError if the file is too short or cannot be read.
        """
        memory = target.view(torch.uint8).numpy().data
        offset = self.offset_bytes + first * target.itemsize
        try:
            # No mmap: its pages would stay resident in addition to the copy.
            with open(self.file, "rb", buffering=0) as file:
                end = offset + transfer_all(os.preadv, file.fileno(), memory, offset)
        except OSError as error:
            raise ModelError(f"{self.file} can't be read: {error}") from error
        if end < offset + len(memory):
            raise ModelError(f"{self.file} ends at byte {end}, within {self.key}; download it again")


@dataclass(frozen=True)
class Source:
    """Concatenation of tensors of one dtype in files, as one value."""

    pieces: tuple[TensorInFile, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.pieces[0].dtype

    def __str__(self) -> str:
        first, more = self.pieces[0], len(self.pieces) - 1
        rest = f" and {more} more" if more else ""
        return f"{first.key}{rest} ({self.dtype}, {list(self.shape)})"

    def read(self, first: int, numel: int) -> torch.Tensor:
        """Read `numel` elements from `first`, as a flat tensor."""
        values = torch.empty(numel, dtype=DTYPES[self.dtype], device="cpu")
        offset = 0  # first element of the piece
        for piece in self.pieces:
            begin, end = max(first, offset), min(first + numel, offset + piece.numel)
            if begin < end:
                piece.read_into(values[begin - first : end - first], begin - offset)
            offset += piece.numel
        return values


def read_header(file: Path) -> dict[str, TensorInFile]:
    """Return the tensors of a safetensors file by key.

    Validates all sizes: reads no more than the file's length. Raises ModelError, naming the file, if a size is invalid
    or a tensor exceeds the file.
    """
    try:
        with open(file, "rb") as opened:
            length = os.fstat(opened.fileno()).st_size
            header_bytes = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            begin = _LENGTH_BYTES + header_bytes
            if length < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES or begin > length:
                raise ModelError(
                    f"{file} is not a safetensors file, or is truncated: it has {length} bytes, and declares a header "
                    f"of {header_bytes} bytes; download it again"
                )
            header = json.loads(opened.read(header_bytes).decode())
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        header.pop("__metadata__", None)
        return {key: _tensor_in_file(file, key, entry, begin, length) for key, entry in header.items()}
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} can't be read as safetensors: {error}") from error


def _tensor_in_file(file: Path, key: str, entry: Any, begin: int, length: int) -> TensorInFile:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(end)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            stored = TensorInFile(key, file, dtype, tuple(shape), begin + first)
        case _:
            raise ValueError(f"the header entry of {key} is not valid")
    if not 0 <= first <= end:
        raise ValueError(f"{key} begins at byte {first} and ends at {end}")
    if begin + end > length:
        raise ModelError(
            f"{file} is truncated: {key} ends at byte {begin + end}, and the file at {length}; download it again"
        )
    if dtype in DTYPES and end - first != stored.numel * DTYPES[dtype].itemsize:
        raise ValueError(f"{key} has {end - first} bytes, which does not match {dtype} of shape {list(shape)}")
    return stored


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


def tensors_of(folder: Path) -> dict[str, TensorInFile]:
    """Return all tensors of a folder by their names in its files; read only headers.

    Raises ModelError if there are none, if they are pickles, or if the index and its files do not match.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return _of_index(index)
    if single.is_file():
        return read_header(single)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run code when they are loaded; "
            f"convert them to {_SINGLE}"
        )
    raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _of_index(index: Path) -> dict[str, TensorInFile]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = dict(weight_map.items())
        headers = {shard: read_header(_beside(index, shard)) for shard in sorted(set(shards.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"the index {index} can't be read: {error!r}") from error
    missing = sorted(key for key, shard in shards.items() if key not in headers[shard])
    if missing:
        raise ModelError(f"{index} names tensors that its files don't hold: {listed(missing)}")
    unlisted = {key: stored for header in headers.values() for key, stored in header.items() if key not in shards}
    return unlisted | {key: headers[shard][key] for key, shard in shards.items()}


def _beside(index: Path, shard: str) -> Path:
    """Return the file that an index names. Symbolic links may leave the folder; names in the index may not."""
    name = PurePosixPath(shard)
    if name.is_absolute() or ".." in name.parts or "\0" in shard:
        raise ModelError(f"{index} names the file {shard!r}, which is outside of its folder; it was not read")
    file = index.parent / name
    if not file.is_file():
        raise ModelError(f"{index} names the file {shard!r}, which does not exist")
    return file


def listed(names: list[str], limit: int = 10) -> str:
    """Format names for a message: the first ones, and the number of the rest."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
