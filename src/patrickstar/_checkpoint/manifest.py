"""The document of a checkpoint: which tensors there are, in which file each part of them lies, and the checksums.

It is two lines of JSON. The first one names the format and its version, and has the length and the checksum of the
second, so that a reader of another version can say so, and damage shows before anything is believed. The format is
described in docs/checkpoints.md.
"""

import json
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from xxhash import xxh3_64_hexdigest

from patrickstar._checkpoint.safetensors_file import DTYPES
from patrickstar._memory.swap_file import BLOCK_BYTES
from patrickstar.errors import CheckpointError

NAME = "checkpoint.jsonl"
VERSION = 1
LARGEST_BYTES = 256 * 1024**2
"""No document, and no plain data in a file, is longer. One of a trillion parameters, on pages of 4 MiB, has 60 MB."""
LARGEST_PAGE_BYTES = 64 * 1024**2
"""What a reader has to take memory for before it can know better."""

ITEMSIZES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors")
_SUM = re.compile(r"[0-9a-f]{16}")


class ValidatedModel(BaseModel):
    """Data of a checkpoint, of which nothing is believed before it was looked at."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ManifestFile(ValidatedModel):
    """A file of one process: its name, its length, and the checksum of each of its pages."""

    name: str
    nbytes: int = Field(ge=0)
    sums: list[str]

    @model_validator(mode="after")
    def _names_a_file_here(self) -> "ManifestFile":
        if not FILE_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a file here")
        if not all(_SUM.fullmatch(one) for one in self.sums):
            raise ValueError(f"a checksum of {self.name} is none")
        return self


class StoredBox(ValidatedModel):
    """A box of a tensor: where it begins in the tensor, its sizes, and where its bytes begin in which file."""

    offsets: list[int]
    sizes: list[int]
    file: int = Field(ge=0)
    at: int = Field(ge=0)


def _overlap(parts: Sequence[StoredBox]) -> bool:
    """Whether two boxes have an element in common."""
    boxes = sorted(
        [(begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True)]
        for part in parts
        if prod(part.sizes)
    )
    live: list[list[tuple[int, int]]] = []
    for box in boxes:
        # Only those that reach beyond where this one begins can meet it, or any later one.
        live = [other for other in live if not box or other[0][1] > box[0][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in live):
            return True
        live.append(box)
    return False


class ManifestTensor(ValidatedModel):
    """A tensor by its dtype and shape, and its boxes; or plain data, as so many bytes of JSON."""

    dtype: str
    shape: list[int]
    parts: list[StoredBox]
    plain: bool = False

    @model_validator(mode="after")
    def _boxes_fill_it(self) -> "ManifestTensor":
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"there is no dtype {self.dtype!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.shape} is no shape")
        for part in self.parts:
            if not len(part.offsets) == len(part.sizes) == len(self.shape):
                raise ValueError(f"a part at {part.offsets} is no box of a tensor {self.shape}")
            for begin, size, whole in zip(part.offsets, part.sizes, self.shape, strict=True):
                if begin < 0 or size < 0 or begin + size > whole:
                    raise ValueError(f"a part at {part.offsets} of {part.sizes} reaches beyond {self.shape}")
        if _overlap(self.parts):
            raise ValueError(f"parts of a tensor {self.shape} lie over one another")
        if sum(prod(part.sizes) for part in self.parts) != prod(self.shape):
            raise ValueError(f"its parts are not the {prod(self.shape)} elements of a tensor {self.shape}")
        return self


class Manifest(ValidatedModel):
    """What a checkpoint says of itself."""

    processes: int = Field(ge=1)
    written_by: str
    page_bytes: int = Field(gt=0, le=LARGEST_PAGE_BYTES, multiple_of=BLOCK_BYTES)
    files: list[ManifestFile]
    tensors: dict[str, ManifestTensor]

    @model_validator(mode="after")
    def _lies_within_files(self) -> "Manifest":
        for file in self.files:
            if len(file.sums) != -(-file.nbytes // self.page_bytes):
                raise ValueError(f"{file.name} of {file.nbytes} bytes has {len(file.sums)} checksums")
        taken: list[tuple[int, int, int, str]] = []
        for name, tensor in self.tensors.items():
            for part in tensor.parts:
                nbytes = prod(part.sizes) * ITEMSIZES[tensor.dtype]
                if part.file >= len(self.files) or part.at + nbytes > self.files[part.file].nbytes:
                    raise ValueError(f"{name} reaches beyond its file")
                if nbytes:
                    taken.append((part.file, part.at, part.at + nbytes, name))
            if tensor.plain and (tensor.dtype != "uint8" or prod(tensor.shape) > LARGEST_BYTES):
                raise ValueError(f"{name} is no plain data")
        for (number, _, end, one), (next_number, begin, _, other) in pairwise(sorted(taken)):
            if number == next_number and begin < end:
                raise ValueError(f"{one} and {other} lie over one another")
        return self


class ManifestHeader(ValidatedModel):
    """The first line. `sequence` counts the checkpoints of a folder, so that the newest is known."""

    format: Literal["patrickstar checkpoint"] = "patrickstar checkpoint"
    version: int
    sequence: int = Field(ge=0)
    nbytes: int
    xxh3: str


def write_document(folder: Path, document: Manifest, sequence: int) -> None:
    """Put it into the folder, and all of it on the disk. Raises OSError."""
    text = document.model_dump_json().encode()
    head = ManifestHeader(version=VERSION, sequence=sequence, nbytes=len(text), xxh3=xxh3_64_hexdigest(text))
    with (folder / NAME).open("xb") as file:
        file.write(head.model_dump_json().encode() + b"\n" + text)
        file.flush()
        os.fsync(file.fileno())


def read_document(folder: Path) -> Manifest:
    """What a checkpoint holds, every word of it checked.

    Raises CheckpointError for what is no checkpoint, is damaged or incomplete, or is of a newer version.
    """
    path = folder / NAME
    try:
        nbytes = path.stat().st_size
        if nbytes > LARGEST_BYTES:
            raise CheckpointError(f"{path} has {nbytes} bytes; no checkpoint's document has more than {LARGEST_BYTES}")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of PatrickStar: {_unreadable_error(folder, error)}"
        ) from error
    first, _, text = content.partition(b"\n")
    head = _head(path, first)
    try:
        if len(text) != head.nbytes or xxh3_64_hexdigest(text) != head.xxh3:
            raise CheckpointError(
                f"{path} is damaged: it has {len(text)} bytes of {head.nbytes}, or others than were written; use an "
                f"older checkpoint"
            )
        document = Manifest.model_validate_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not what a checkpoint holds: {first_error(error)}") from error
    for file in document.files:
        _check_file(folder / file.name, file.nbytes)
    return document


def read_sequence(folder: Path) -> int:
    """The number of a checkpoint among those of its folder; nothing else of it is looked at.

    Raises CheckpointError for what is no checkpoint, or is of a newer version.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            first = file.readline(BLOCK_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of PatrickStar: {_unreadable_error(folder, error)}"
        ) from error
    return _head(path, first).sequence


def _head(path: Path, line: bytes) -> ManifestHeader:
    try:
        told = json.loads(line)
        if not isinstance(told, dict) or told.get("format") != "patrickstar checkpoint":
            raise CheckpointError(f"{path} does not begin as a document of PatrickStar's checkpoints does")
        if told.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {told.get('version')!r} of the format, and this PatrickStar reads {VERSION}; use "
                f"the version of PatrickStar that wrote it, or a newer one"
            )
        return ManifestHeader.model_validate(told)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not what a checkpoint holds: {first_error(error)}") from error


def _check_file(path: Path, nbytes: int) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path} of this checkpoint can't be found: {error.strerror}") from error
    if not S_ISREG(found.st_mode) or found.st_size != nbytes:
        raise CheckpointError(
            f"{path} is damaged: it has {found.st_size} bytes, and {nbytes} were written; use an older checkpoint"
        )


def _unreadable_error(folder: Path, error: OSError | ValueError) -> str:
    if os.path.isfile(folder):
        return "it is a file, not a folder"
    if not os.path.isdir(folder):
        return "there is no such folder"
    if (folder / ".metadata").exists():
        return (
            "it was written by torch.distributed.checkpoint's own writer, whose metadata is a pickle, which can run "
            "code when it is read; load it with PyTorch, and give the values to engine.load_state_dict"
        )
    if (folder / "config.json").exists():
        return "it is a model folder; give it as the model (--model), it has no state of training"
    return f"it has no {NAME} that can be read ({error})"


def first_error(error: Exception) -> str:
    """The first thing that a check of data has found, for a message."""
    if isinstance(error, ValidationError):
        one = error.errors()[0]
        return f"{'.'.join(str(place) for place in one['loc'])}: {one['msg']}"
    return f"{type(error).__name__}: {error}"
