"""Reads a checkpoint as torch.distributed.checkpoint asks for it, page by page, each page's checksum compared."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from xxhash import xxh3_64_hexdigest

from patrickstar._checkpoint.manifest import Manifest, read_document
from patrickstar.errors import CheckpointError


@dataclass(frozen=True)
class _Source:
    """Where the elements of a box lie in a row."""

    file: int
    at: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


class CheckpointReader(StorageReader):
    """Reads the checkpoint in a folder; `torch.distributed.checkpoint.load` takes it as `storage_reader` too.

    Parameters are under `model.NAME`, an optimizer's states under `optim.state.NAME.KIND`. Nothing is unpickled, and
    memory is taken for a page alone. Raises CheckpointError for what is no checkpoint, or is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.document: Manifest = read_document(self.folder)
        self.read_bytes = 0
        """Bytes that came from the disk."""
        self._verified_page: tuple[int, int] | None = None
        self._page = bytearray()
        self._sources = {
            MetadataIndex(name, None if tensor.plain else part.offsets): _Source(
                part.file, part.at, getattr(torch, tensor.dtype), tuple(part.sizes)
            )
            for name, tensor in self.document.tensors.items()
            for part in tensor.parts
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """It reads one folder."""

    def read_metadata(self) -> Metadata:
        """What there is, in the words of torch.distributed.checkpoint."""
        told: dict[str, Any] = {}
        for name, tensor in self.document.tensors.items():
            if tensor.plain:
                told[name] = BytesStorageMetadata()
                continue
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.parts]
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            told[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(told)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """It knows its metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Look at every page that is to be read, so that damage shows before anything changes."""
        for file, number in sorted({page for item in plan.items for page in self._pages_of(item)}):
            self._have(file, number)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, in the order of the files."""
        for item in sorted(plan.items, key=lambda item: self._key(item)):
            source = self._sources[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._bytes(source)))
                continue
            target = planner.resolve_tensor(item).detach()
            self._fill(target, source, *_within(item, source))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never to be found by a name alone."""
        return False

    def plain(self, name: str) -> bytes | None:
        """Plain data by its name; None if there is none."""
        source = self._sources.get(MetadataIndex(name))
        return None if source is None else self._bytes(source)

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor by its name."""
        told = self.document.tensors[name]
        whole = torch.empty(told.shape, dtype=getattr(torch, told.dtype), device="cpu")
        for part in told.parts:
            source = self._sources[MetadataIndex(name, part.offsets)]
            self._fill(narrowed(whole, part.offsets, part.sizes), source, 0, _strides(source))
        return whole

    # Inside

    def _bytes(self, source: _Source) -> bytes:
        return self._read(source, 0, prod(source.sizes)).numpy().tobytes()

    def _key(self, item: ReadItem) -> tuple[int, int]:
        source = self._sources[item.storage_index]
        first = 0 if item.type is LoadItemType.BYTE_IO else _within(item, source)[0]
        return source.file, source.at + first * source.dtype.itemsize

    def _pages_of(self, item: ReadItem) -> list[tuple[int, int]]:
        """The pages on which an item's bytes lie, perhaps others between them."""
        source, page_bytes = self._sources[item.storage_index], self.document.page_bytes
        first, end = 0, prod(source.sizes)
        if item.type is not LoadItemType.BYTE_IO:
            first, strides = _within(item, source)
            lengths = tuple(item.lengths)
            last = first + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
            end = last + 1 if prod(lengths) else first
        begin, stop = (source.at + at * source.dtype.itemsize for at in (first, end))
        return [(source.file, page) for page in range(begin // page_bytes, -(-stop // page_bytes))]

    def _fill(self, target: torch.Tensor, source: _Source, first: int, strides: tuple[int, ...]) -> None:
        """Fill a tensor from elements of a box, the first of which is `first`, with these strides."""
        if not target.numel():
            return
        if target.is_contiguous() and _in_a_row(tuple(target.shape), strides):
            flat = target.view(-1)
            if flat.dtype == source.dtype:
                self._copy(flat.view(torch.uint8), source, first)
                return
            length = max(1, self.document.page_bytes // source.dtype.itemsize)
            for begin in range(0, flat.numel(), length):
                part = flat[begin : begin + length]
                part.copy_(self._read(source, first + begin, part.numel()))
            return
        for row in range(target.shape[0]):
            self._fill(target[row], source, first + row * strides[0], strides[1:])

    def _read(self, source: _Source, first: int, numel: int) -> torch.Tensor:
        """A copy of so many elements of a box."""
        found = torch.empty(numel * source.dtype.itemsize, dtype=torch.uint8, device="cpu")
        self._copy(found, source, first)
        return found.view(source.dtype)

    def _copy(self, target: torch.Tensor, source: _Source, first: int) -> None:
        """Fill bytes with those of a box from an element on."""
        at, done, page_bytes = source.at + first * source.dtype.itemsize, 0, self.document.page_bytes
        while done < target.numel():
            number, begin = divmod(at + done, page_bytes)
            page = torch.frombuffer(self._have(source.file, number), dtype=torch.uint8)
            part = page[begin : begin + target.numel() - done]
            target[done : done + part.numel()] = part
            done += part.numel()

    def _have(self, number: int, page: int) -> bytearray:
        """A page of a file, whose checksum was compared."""
        if self._verified_page == (number, page):
            return self._page
        file, page_bytes = self.document.files[number], self.document.page_bytes
        path = self.folder / file.name
        length = min(page_bytes, file.nbytes - page * page_bytes)
        if len(self._page) != length:
            self._page = bytearray(length)
        self._verified_page = None
        memory = memoryview(self._page)
        try:
            with path.open("rb", buffering=0) as stream:
                done = 0
                while done < length:
                    read = os.preadv(stream.fileno(), [memory[done:]], page * page_bytes + done)
                    if not read:
                        raise OSError(0, f"it ends after {page * page_bytes + done} bytes")
                    done += read
                os.posix_fadvise(stream.fileno(), page * page_bytes, length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(
                f"{path} can't be read: {error.strerror or error}; use an older checkpoint"
            ) from error
        self.read_bytes += length
        if xxh3_64_hexdigest(memory) != file.sums[page]:
            raise CheckpointError(
                f"{path} is damaged: the {length} bytes from {page * page_bytes} on are not those that were written; "
                f"nothing was loaded, use an older checkpoint"
            )
        self._verified_page = number, page
        return self._page


def narrowed(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The box of a tensor that begins there."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _within(item: ReadItem, source: _Source) -> tuple[int, tuple[int, ...]]:
    """The first element in its box of what an item asks for, and the strides there."""
    strides = _strides(source)
    return sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True)), strides


def _strides(source: _Source) -> tuple[int, ...]:
    """Those of a box whose elements lie in a row."""
    strides, step = [], 1
    for size in reversed(source.sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _in_a_row(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of this shape with these strides follow one another."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
