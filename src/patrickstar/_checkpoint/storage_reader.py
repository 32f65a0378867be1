"""Storage reader for torch.distributed.checkpoint that verifies the checksum of every page."""

import io
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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

from patrickstar._checkpoint.manifest import ZEROS, Manifest, ManifestFile, read_manifest
from patrickstar._hardware.direct_io import transfer_all
from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._layout.shard_geometry import Box
from patrickstar.errors import CheckpointError


@dataclass(frozen=True)
class BoxSource:
    """Contiguous elements of a box in a file."""

    file: int
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Page:
    """Page of a file: its first byte there, its bytes, and where it is stored in how many bytes."""

    start: int
    nbytes: int
    place: int
    stored: int


@dataclass(frozen=True)
class LinkedPages:
    """Consecutive pages of a linked file: place, stored bytes and checksum of each; some may be packed."""

    table: list[tuple[int, int, str]]
    packed: bool


class _Pages:
    """Pages of a file, or of a linked file whose pages form one."""

    def __init__(self, file: ManifestFile, page_bytes: int) -> None:
        if file.pages is None:
            starts = list(range(0, file.nbytes, page_bytes))
            sizes = [min(page_bytes, file.nbytes - start) for start in starts]
            places, stored = starts, sizes
        else:
            sizes, places, stored = file.pages.sizes, file.pages.places, file.pages.stored
            starts = list(accumulate(sizes, initial=0))[:-1]
        self._starts = starts
        self._pages = [_Page(*page) for page in zip(starts, sizes, places, stored, strict=True)]

    def __getitem__(self, number: int) -> _Page:
        return self._pages[number]

    def span(self, offset: int, sizes: Sequence[int]) -> range:
        """Return the numbers of the pages of these sizes from an offset on; an empty range if there are none."""
        first = self.number(offset)
        found = self._pages[first : first + len(sizes)]
        fits = found and found[0].start == offset and [page.nbytes for page in found] == list(sizes)
        return range(first, first + len(sizes)) if fits else range(0)

    def number(self, offset: int) -> int:
        """Return the number of the page that has the byte at an offset."""
        return bisect_right(self._starts, offset) - 1


class CheckpointReader(StorageReader):
    """Reader of the checkpoint in a folder, usable as `storage_reader` of `torch.distributed.checkpoint.load`.

    Parameters are named `model.NAME`, optimizer states `optim.state.NAME.KIND`. Never unpickles; buffers one page.
    Raises CheckpointError if the folder is not a checkpoint or is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        self.read_bytes = 0
        """Bytes read from disk so far."""
        self._pages = [_Pages(file, self.manifest.page_bytes) for file in self.manifest.files]
        self._verified_page: tuple[int, int] | None = None
        self._page = bytearray()
        self._sources = {
            MetadataIndex(name, None if tensor.plain else part.offsets): BoxSource(
                part.file, part.at, getattr(torch, tensor.dtype), tuple(part.sizes)
            )
            for name, tensor in self.manifest.tensors.items()
            for part in tensor.parts
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one folder."""

    def read_metadata(self) -> Metadata:
        entries: dict[str, Any] = {}
        for name, tensor in self.manifest.tensors.items():
            if tensor.plain:
                entries[name] = BytesStorageMetadata()
                continue
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.parts]
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the constructor read the manifest."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify every page of the plan, so that damage is found before anything changes."""
        for file, number in sorted({page for item in plan.items for page in self._pages_of(item)}):
            interruption_point()
            self._read_page(file, number)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan in file order."""
        for item in sorted(plan.items, key=lambda item: self._file_offset(item)):
            interruption_point()
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
        """Return False: DCP must not choose this reader from a path."""
        return False

    def plain(self, name: str) -> bytes | None:
        """Return plain data by name; None if missing."""
        source = self._sources.get(MetadataIndex(name))
        return None if source is None else self._bytes(source)

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor by name."""
        stored = self.manifest.tensors[name]
        whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")
        for part in stored.parts:
            source = self._sources[MetadataIndex(name, part.offsets)]
            self._fill(narrowed(whole, part.offsets, part.sizes), source, 0, _strides(source))
        return whole

    @property
    def linked_files(self) -> list[int]:
        """Numbers of the files that are links to swap files."""
        return [number for number, file in enumerate(self.manifest.files) if file.pages is not None]

    def path(self, number: int) -> Path:
        """Return the path of a file."""
        return self.folder / self.manifest.files[number].name

    def source(self, name: str, box: Box) -> BoxSource | None:
        """Return where a box of a tensor is, None if it was not saved as one box."""
        source = self._sources.get(MetadataIndex(name, box.offsets))
        return source if source is not None and source.sizes == box.sizes else None

    def linked_pages(self, number: int, at: int, sizes: Sequence[int]) -> LinkedPages | None:
        """Return the pages of these sizes from a byte of a linked file on; None if its pages are others."""
        if not (span := self._pages[number].span(at, sizes)):
            return None
        pages, sums = self._pages[number], self.manifest.files[number].sums
        table = [(pages[page].place, pages[page].stored, sums[page]) for page in span]
        return LinkedPages(table, any(0 < pages[page].stored < pages[page].nbytes for page in span))

    # Internals

    def _bytes(self, source: BoxSource) -> bytes:
        return self._read(source, 0, prod(source.sizes)).numpy().tobytes()

    def _file_offset(self, item: ReadItem) -> tuple[int, int]:
        source = self._sources[item.storage_index]
        first = 0 if item.type is LoadItemType.BYTE_IO else _within(item, source)[0]
        return source.file, source.offset + first * source.dtype.itemsize

    def _pages_of(self, item: ReadItem) -> list[tuple[int, int]]:
        """Return the (file, page) pairs from the first to the last byte of an item."""
        source = self._sources[item.storage_index]
        first, end = 0, prod(source.sizes)
        if item.type is not LoadItemType.BYTE_IO:
            first, strides = _within(item, source)
            lengths = tuple(item.lengths)
            last = first + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
            end = last + 1 if prod(lengths) else first
        begin, stop = (source.offset + element * source.dtype.itemsize for element in (first, end))
        if begin == stop:
            return []
        pages = self._pages[source.file]
        return [(source.file, page) for page in range(pages.number(begin), pages.number(stop - 1) + 1)]

    def _fill(self, target: torch.Tensor, source: BoxSource, first: int, strides: tuple[int, ...]) -> None:
        """Fill a tensor from a box, beginning at element `first`, with the given strides in the box."""
        if not target.numel():
            return
        if target.is_contiguous() and _is_contiguous(tuple(target.shape), strides):
            flat = target.view(-1)
            if flat.dtype == source.dtype:
                self._copy(flat.view(torch.uint8), source, first)
                return
            length = max(1, self.manifest.page_bytes // source.dtype.itemsize)
            for begin in range(0, flat.numel(), length):
                part = flat[begin : begin + length]
                part.copy_(self._read(source, first + begin, part.numel()))
            return
        for row in range(target.shape[0]):
            self._fill(target[row], source, first + row * strides[0], strides[1:])

    def _read(self, source: BoxSource, first: int, numel: int) -> torch.Tensor:
        values = torch.empty(numel * source.dtype.itemsize, dtype=torch.uint8, device="cpu")
        self._copy(values, source, first)
        return values.view(source.dtype)

    def _copy(self, target: torch.Tensor, source: BoxSource, first: int) -> None:
        """Fill a uint8 tensor with bytes of a box, beginning at element `first`."""
        offset, done, pages = source.offset + first * source.dtype.itemsize, 0, self._pages[source.file]
        while done < target.numel():
            number = pages.number(offset + done)
            begin = offset + done - pages[number].start
            page = torch.frombuffer(self._read_page(source.file, number), dtype=torch.uint8)
            part = page[begin : begin + target.numel() - done]
            target[done : done + part.numel()] = part
            done += part.numel()

    def _read_page(self, number: int, page: int) -> bytearray:
        """Read a page of a file and verify its checksum; the last page is cached."""
        if self._verified_page == (number, page):
            return self._page
        file, found = self.manifest.files[number], self._pages[number][page]
        path = self.folder / file.name
        self._verified_page = None
        if found.place == ZEROS:
            self._page = bytearray(found.nbytes)
        else:
            if len(self._page) != found.stored:
                self._page = bytearray(found.stored)
            self._read_stored(path, found, memoryview(self._page))
            if xxh3_64_hexdigest(self._page) != file.sums[page]:
                raise CheckpointError(
                    f"{path} is damaged: the checksum of {found.stored} bytes at offset {found.place} does not match; "
                    f"nothing was loaded, use an older checkpoint"
                )
            if found.stored < found.nbytes:
                self._page = _unpacked(path, found, self._page)
        self._verified_page = number, page
        return self._page

    def _read_stored(self, path: Path, page: _Page, memory: memoryview) -> None:
        """Read the stored bytes of a page. Raises CheckpointError if the file can't be read."""
        try:
            with path.open("rb", buffering=0) as stream:
                done = transfer_all(os.preadv, stream.fileno(), memory, page.place)
                if done < page.stored:
                    raise OSError(0, f"the file ends after {page.place + done} bytes")
                os.posix_fadvise(stream.fileno(), page.place, page.stored, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(
                f"{path} can't be read: {error.strerror or error}; use an older checkpoint"
            ) from error
        self.read_bytes += page.stored


def _unpacked(path: Path, page: _Page, stored: bytearray) -> bytearray:
    """Return a page that is stored packed. Raises CheckpointError without the kernel, or if it is damaged."""
    try:
        codec = CppBackend.load().codec
    except Unavailable as error:
        raise CheckpointError(f"{path} has packed pages, which only the C++ kernel can read. {error}") from error
    unpacked = bytearray(page.nbytes)
    source, target = (torch.frombuffer(each, dtype=torch.uint8) for each in (stored, unpacked))
    if not codec.unpack(source.data_ptr(), page.stored, target.data_ptr(), page.nbytes):
        raise CheckpointError(f"{path} is damaged: the page at offset {page.place} can't be unpacked")
    return unpacked


def narrowed(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _within(item: ReadItem, source: BoxSource) -> tuple[int, tuple[int, ...]]:
    """Return the first requested element within the stored box, and the strides of the box."""
    strides = _strides(source)
    return sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True)), strides


def _strides(source: BoxSource) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(source.sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements of this shape with these strides are contiguous."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
