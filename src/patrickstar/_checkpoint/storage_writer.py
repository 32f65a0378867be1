"""Writes a checkpoint as torch.distributed.checkpoint asks for it: each process a file, one of them the document."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from patrickstar._checkpoint.atomic_dir import AtomicDir, complete
from patrickstar._checkpoint.manifest import Manifest, ManifestFile, ManifestTensor, StoredBox
from patrickstar._checkpoint.safetensors_file import SafetensorsFile, TensorEntry


@dataclass(frozen=True)
class WrittenItem:
    """Where an item's bytes begin, in which process's file."""

    rank: int
    at: int


@dataclass(frozen=True)
class WrittenFile:
    """A process's file: its bytes, and the checksums of its pages."""

    rank: int
    nbytes: int
    sums: tuple[str, ...]


class DataSource(Protocol):
    """Who has the bytes: they may come from another thread, when it has time for them."""

    def addresses(self, items: Sequence[WriteItem]) -> dict[int, int]:
        """Where in memory items lie that shall go to the disk from there."""
        ...

    def fill(self, file: SafetensorsFile, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        """Have all items in the file when this returns."""
        ...


def entry_of(item: WriteItem) -> TensorEntry:
    """An item as a tensor of a safetensors file; a part of a tensor has its place in its name."""
    if item.type is WriteItemType.BYTE_IO:
        assert item.bytes_io_data is not None
        return TensorEntry(item.index.fqn, torch.uint8, (item.bytes_io_data.nbytes,))
    assert item.tensor_data is not None
    chunk, whole = item.tensor_data.chunk, item.tensor_data.size
    name = item.index.fqn
    if tuple(chunk.sizes) != tuple(whole):
        name += "[" + ", ".join(f"{b}:{b + n}" for b, n in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"
    return TensorEntry(name, item.tensor_data.properties.dtype, tuple(chunk.sizes))


class CheckpointWriter(StorageWriter):
    """Writes into a hidden folder, which becomes the checkpoint `target` when all processes have written.

    Raises CheckpointError if `target` exists, or the disk is full or fails.
    """

    def __init__(self, target: Path, feed: DataSource, *, page_bytes: int) -> None:
        self.target = target
        self.feed = feed
        self.page_bytes = page_bytes
        self._partial: AtomicDir | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing is made before all processes have a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator makes the folder, and tells the others."""
        self._partial = AtomicDir(self.target)
        return [
            SavePlan(plan.items, (str(self._partial.path.absolute()), rank), plan.planner_data)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; it is on the disk when this returns."""
        folder, rank = plan.storage_data
        entries = [entry_of(item) for item in plan.items]
        path = Path(folder) / file_name(rank)
        addresses = self.feed.addresses(plan.items)
        file = SafetensorsFile(path, entries, addresses=addresses, page_bytes=self.page_bytes)
        try:
            self.feed.fill(file, plan.items, planner)
            file.close()
        except BaseException:
            file.abandon()
            raise
        results = [
            WriteResult(item.index, entry.nbytes, WrittenItem(rank, at))
            for item, entry, at in zip(plan.items, entries, file.starts, strict=True)
        ]
        written = WrittenFile(rank, file.file.nbytes, tuple(file.file.sums))
        results.append(WriteResult(MetadataIndex(path.name), written.nbytes, written))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make a checkpoint of what all processes have written."""
        assert self._partial is not None
        document = _document(metadata, [one for rank_key in results for one in rank_key], self.page_bytes)
        before = max((number for number, _ in complete(self.target.parent)), default=0)
        self._partial.publish(document, before + 1)
        self._partial = None

    def abandon(self) -> None:
        """Remove what is there of a checkpoint that did not come about."""
        if self._partial is not None:
            self._partial.abandon()
            self._partial = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never to be found by a name alone."""
        return False


def file_name(rank: int) -> str:
    """The name of a process's file."""
    return f"rank-{rank:05d}.safetensors"


def _document(metadata: Metadata, results: Sequence[WriteResult], page_bytes: int) -> Manifest:
    files = [one.storage_data for one in results if isinstance(one.storage_data, WrittenFile)]
    where = {one.index: one.storage_data for one in results if isinstance(one.storage_data, WrittenItem)}
    sizes = {one.index: one.size_in_bytes for one in results}
    tensors = {}
    for name, told in metadata.state_dict_metadata.items():
        if isinstance(told, TensorStorageMetadata):
            parts = [
                StoredBox(offsets=list(chunk.offsets), sizes=list(chunk.sizes), file=wrote.rank, at=wrote.at)
                for chunk, wrote in _placed(name, told, where)
            ]
            dtype = str(told.properties.dtype).removeprefix("torch.")
            tensors[name] = ManifestTensor(dtype=dtype, shape=list(told.size), parts=parts)
        else:
            index = MetadataIndex(name)
            part = StoredBox(offsets=[0], sizes=[sizes[index]], file=where[index].rank, at=where[index].at)
            tensors[name] = ManifestTensor(dtype="uint8", shape=[sizes[index]], parts=[part], plain=True)
    return Manifest(
        processes=len(files),
        written_by=f"PatrickStar {version('patrickstar')}, PyTorch {torch.__version__}",
        page_bytes=page_bytes,
        files=[ManifestFile(name=file_name(one.rank), nbytes=one.nbytes, sums=list(one.sums)) for one in files],
        tensors=tensors,
    )


def _placed(
    name: str, told: TensorStorageMetadata, where: dict[MetadataIndex, WrittenItem]
) -> Iterator[tuple[ChunkStorageMetadata, WrittenItem]]:
    for chunk in told.chunks:
        yield chunk, where[MetadataIndex(name, chunk.offsets)]
