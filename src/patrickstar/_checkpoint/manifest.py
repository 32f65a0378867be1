"""Checkpoint manifest: tensors, the file location of each part, and checksums.

The manifest is two lines of JSON. The first line holds the format name, the version, and the length and checksum of
the second line, so that a reader detects another version or damage before it parses the rest. docs/checkpoints.md
describes the format.
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
from patrickstar._hardware.direct_io import BLOCK_BYTES
from patrickstar._layout.shard_geometry import Box, listed, uncovered
from patrickstar.errors import CheckpointError

NAME = "checkpoint.jsonl"
VERSION = 1
VERSION_WITH_PAGES = 2
"""Version of a checkpoint that refers to pages of a linked file."""
ZEROS = -1
"""Place of a page of zeros."""
LARGEST_BYTES = 256 * 1024**2
"""Limit for a manifest and for plain data. A manifest of a trillion parameters has 60 MB with pages of 4 MiB."""
LARGEST_PAGE_BYTES = 64 * 1024**2
"""Limit for the page buffer that a reader allocates before it can verify anything."""

ITEMSIZES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}
FILE_NAME = re.compile(r"rank-\d{5}\.(safetensors|chunks)")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class ValidatedModel(BaseModel):
    """Base of checkpoint data models with strict validation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ManifestPages(ValidatedModel):
    """Pages of a linked file, in the order in which they are the file of which parts are boxes.

    places: Byte offset of each page in the linked file, `ZEROS` for a page of zeros.
    sizes: Bytes of each page.
    stored: Bytes of each page in the linked file: fewer than `sizes` if it is packed.
    """

    places: list[int]
    sizes: list[int]
    stored: list[int]

    @model_validator(mode="after")
    def _check_pages(self) -> "ManifestPages":
        if not len(self.places) == len(self.sizes) == len(self.stored):
            raise ValueError("pages lack a place, a size or stored bytes")
        for place, size, stored in zip(self.places, self.sizes, self.stored, strict=True):
            written = place >= 0 and place % BLOCK_BYTES == 0 and 0 < stored <= size
            if not 0 < size <= LARGEST_PAGE_BYTES or not (written or (place, stored) == (ZEROS, 0)):
                raise ValueError(f"{stored} bytes at {place} are no page of {size} bytes")
        return self


class ManifestFile(ValidatedModel):
    """File of one process: name, length in bytes, and checksum of each page; `pages` if it is linked."""

    name: str
    nbytes: int = Field(ge=0)
    sums: list[str]
    pages: ManifestPages | None = None

    @model_validator(mode="after")
    def _check_names(self) -> "ManifestFile":
        if not FILE_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a valid file name")
        if not all(_CHECKSUM.fullmatch(checksum) for checksum in self.sums):
            raise ValueError(f"a checksum of {self.name} is not valid")
        if self.pages is not None and self.nbytes != sum(self.pages.sizes):
            raise ValueError(f"the pages of {self.name} are not its {self.nbytes} bytes")
        return self


class StoredBox(ValidatedModel):
    """Box of a tensor: offsets and sizes in the tensor, index of the file, and byte offset (`at`) in the file."""

    offsets: list[int]
    sizes: list[int]
    file: int = Field(ge=0)
    at: int = Field(ge=0)


def _overlap(parts: Sequence[StoredBox]) -> bool:
    boxes = sorted(
        [(begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True)]
        for part in parts
        if prod(part.sizes)
    )
    active: list[list[tuple[int, int]]] = []
    for box in boxes:
        # Boxes are sorted by start: one that ends before this start overlaps neither this box nor a later one.
        active = [other for other in active if not box or other[0][1] > box[0][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in active):
            return True
        active.append(box)
    return False


class ManifestTensor(ValidatedModel):
    """Tensor with dtype, shape and boxes; or plain data, stored as uint8 elements of JSON text."""

    dtype: str
    shape: list[int]
    parts: list[StoredBox]
    plain: bool = False

    @model_validator(mode="after")
    def _check_boxes(self) -> "ManifestTensor":
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.shape} is not a shape")
        for part in self.parts:
            if not len(part.offsets) == len(part.sizes) == len(self.shape):
                raise ValueError(f"the part at {part.offsets} does not have the dimensions of a tensor {self.shape}")
            for begin, size, whole in zip(part.offsets, part.sizes, self.shape, strict=True):
                if begin < 0 or size < 0 or begin + size > whole:
                    raise ValueError(f"the part at {part.offsets} of {part.sizes} exceeds the shape {self.shape}")
        if _overlap(self.parts):
            raise ValueError(f"parts of a tensor {self.shape} overlap")
        if sum(prod(part.sizes) for part in self.parts) != prod(self.shape):
            boxes = [Box(tuple(part.offsets), tuple(part.sizes)) for part in self.parts]
            missing = listed(uncovered(Box.whole(self.shape), boxes))
            raise ValueError(f"the parts do not cover {missing} of a tensor {self.shape}")
        return self


class Manifest(ValidatedModel):
    """Contents of a checkpoint."""

    processes: int = Field(ge=1)
    written_by: str
    page_bytes: int = Field(gt=0, le=LARGEST_PAGE_BYTES, multiple_of=BLOCK_BYTES)
    files: list[ManifestFile]
    tensors: dict[str, ManifestTensor]

    @model_validator(mode="after")
    def _check_files(self) -> "Manifest":
        for file in self.files:
            count = -(-file.nbytes // self.page_bytes) if file.pages is None else len(file.pages.sizes)
            if len(file.sums) != count:
                raise ValueError(f"{file.name} of {file.nbytes} bytes has {len(file.sums)} checksums")
        extents: list[tuple[int, int, int, str]] = []
        for name, tensor in self.tensors.items():
            for part in tensor.parts:
                nbytes = prod(part.sizes) * ITEMSIZES[tensor.dtype]
                if part.file >= len(self.files) or part.at + nbytes > self.files[part.file].nbytes:
                    raise ValueError(f"{name} exceeds its file")
                if nbytes:
                    extents.append((part.file, part.at, part.at + nbytes, name))
            if tensor.plain and (tensor.dtype != "uint8" or prod(tensor.shape) > LARGEST_BYTES):
                raise ValueError(f"{name} is not valid plain data")
        for (number, _, end, name), (next_number, begin, _, next_name) in pairwise(sorted(extents)):
            if number == next_number and begin < end:
                raise ValueError(f"{name} and {next_name} overlap in the file")
        return self


class ManifestHeader(ValidatedModel):
    """First line. `sequence` numbers the checkpoints of a folder in writing order."""

    format: Literal["patrickstar checkpoint"] = "patrickstar checkpoint"
    version: int
    sequence: int = Field(ge=0)
    nbytes: int
    xxh3: str


def write_manifest(folder: Path, manifest: Manifest, sequence: int) -> None:
    """Write the manifest to the folder and sync it to disk. Raises OSError."""
    text = manifest.model_dump_json(exclude_none=True).encode()
    version = VERSION if all(file.pages is None for file in manifest.files) else VERSION_WITH_PAGES
    header = ManifestHeader(version=version, sequence=sequence, nbytes=len(text), xxh3=xxh3_64_hexdigest(text))
    with (folder / NAME).open("xb") as file:
        file.write(header.model_dump_json().encode() + b"\n" + text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a checkpoint; check that its files exist.

    Raises CheckpointError if the folder is not a checkpoint, is damaged or incomplete, or has a newer version.
    """
    path = folder / NAME
    try:
        nbytes = path.stat().st_size
        if nbytes > LARGEST_BYTES:
            raise CheckpointError(f"{path} has {nbytes} bytes, more than the limit of {LARGEST_BYTES} for a manifest")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise _not_a_checkpoint(folder, error) from error
    first, _, text = content.partition(b"\n")
    header = _parse_header(path, first)
    try:
        if len(text) != header.nbytes or xxh3_64_hexdigest(text) != header.xxh3:
            raise CheckpointError(
                f"{path} is damaged: {len(text)} of {header.nbytes} bytes are there, or their checksum does not match; "
                f"use an older checkpoint"
            )
        manifest = Manifest.model_validate_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a valid manifest: {first_error(error)}") from error
    for file in manifest.files:
        _check_file(folder / file.name, file)
    return manifest


def read_sequence(folder: Path) -> int:
    """Return the sequence number of a checkpoint; read only the header.

    Raises CheckpointError if the folder is not a checkpoint or has a newer version.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            first = file.readline(BLOCK_BYTES)
    except (OSError, ValueError) as error:
        raise _not_a_checkpoint(folder, error) from error
    return _parse_header(path, first).sequence


def _parse_header(path: Path, line: bytes) -> ManifestHeader:
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.get("format") != "patrickstar checkpoint":
            raise CheckpointError(f"{path} does not begin with the header of a PatrickStar checkpoint")
        if fields.get("version") not in (VERSION, VERSION_WITH_PAGES):
            raise CheckpointError(
                f"{path} has version {fields.get('version')!r} of the format, and this PatrickStar reads versions "
                f"{VERSION} and {VERSION_WITH_PAGES}; use the version of PatrickStar that wrote it, or a newer one"
            )
        return ManifestHeader.model_validate(fields)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a valid manifest: {first_error(error)}") from error


def _check_file(path: Path, file: ManifestFile) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"file {path} of the checkpoint is missing: {error.strerror}") from error
    if file.pages is None:
        nbytes, fits = file.nbytes, status.st_size == file.nbytes
    else:
        ends = (place + stored for place, stored in zip(file.pages.places, file.pages.stored, strict=True))
        nbytes = max(ends, default=0)
        fits = status.st_size >= nbytes
    if not S_ISREG(status.st_mode) or not fits:
        raise CheckpointError(
            f"{path} is damaged: it has {status.st_size} bytes, but {nbytes} were written; use an older checkpoint"
        )


def _not_a_checkpoint(folder: Path, error: OSError | ValueError) -> CheckpointError:
    if os.path.isfile(folder):
        reason = "it is a file, not a folder"
    elif not os.path.isdir(folder):
        reason = "there is no such folder"
    elif (folder / ".metadata").exists():
        reason = (
            "torch.distributed.checkpoint's own writer wrote it, with metadata as a pickle, which can run code when it "
            "is read; load it with PyTorch and pass the values to engine.load_state_dict"
        )
    elif (folder / "config.json").exists():
        reason = "it is a model folder without training state; pass it as the model (--model)"
    else:
        reason = f"{NAME} can't be read ({error})"
    return CheckpointError(f"{folder} is not a PatrickStar checkpoint: {reason}")


def first_error(error: Exception) -> str:
    """Describe the first validation failure, for a message."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(key) for key in first['loc'])}: {first['msg']}"
    return f"{type(error).__name__}: {error}"
