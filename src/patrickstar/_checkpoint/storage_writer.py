"""Storage writer for torch.distributed.checkpoint: one file per process and a manifest."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from patrickstar._checkpoint.atomic_dir import AtomicDir, list_checkpoints
from patrickstar._checkpoint.manifest import Manifest, ManifestFile, ManifestTensor, StoredBox
from patrickstar._checkpoint.page_references import PageReferences
from patrickstar._checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from patrickstar._hardware.accelerator import TorchDevice


@dataclass(frozen=True)
class WrittenItem:
    """File that holds an item, and the byte offset in it."""

    file: str
    offset: int


def entry_of(item: WriteItem) -> TensorEntry:
    """Return an item as a safetensors entry; the name of a partial tensor includes its index ranges."""
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
    """Writer into a hidden folder that is renamed to `target` once all processes have written.

    Raises CheckpointError if `target` exists or if the disk is full or fails.

    Args:
        fill: Writes all items to the file of this process, in their order.
        addresses: Memory addresses, by their number in the file, of items that are written without a copy.
        references: Items that are not written, but referred to where they are on the disk.
        accelerator: See `DirectWriter`.
    """

    def __init__(
        self,
        target: Path,
        fill: Callable[[SafetensorsFile], None],
        addresses: Mapping[int, int],
        references: PageReferences | None = None,
        *,
        page_bytes: int,
        accelerator: TorchDevice | None = None,
    ) -> None:
        self.target = target
        self._fill, self._addresses, self._references = fill, addresses, references
        self.page_bytes = page_bytes
        self.accelerator = accelerator
        self._partial: AtomicDir | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Do nothing: the folder is created once all processes have a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder and add its path to every plan. Called on the coordinator rank."""
        self._partial = AtomicDir(self.target)
        return [
            SavePlan(plan.items, (str(self._partial.path.absolute()), rank), plan.planner_data)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file and sync it to disk, and link to the pages that it refers to."""
        folder, rank = plan.storage_data
        at = {} if self._references is None else self._references.at
        items = [item for number, item in enumerate(plan.items) if number not in at]
        entries = [entry_of(item) for item in items]
        path = Path(folder) / file_name(rank)
        file = SafetensorsFile(
            path, entries, addresses=self._addresses, page_bytes=self.page_bytes, accelerator=self.accelerator
        )
        try:
            self._fill(file)
            file.close()
        except BaseException:
            file.abandon()
            raise
        results = [
            WriteResult(item.index, entry.nbytes, WrittenItem(path.name, offset))
            for item, entry, offset in zip(items, entries, file.starts, strict=True)
        ]
        files = [ManifestFile(name=path.name, nbytes=file.nbytes, sums=file.sums)]
        if self._references is not None and at:
            files.append(self._references.link(path.with_suffix(".chunks")))
            for number, offset in at.items():
                item = plan.items[number]
                results.append(WriteResult(item.index, entry_of(item).nbytes, WrittenItem(files[-1].name, offset)))
        results += [WriteResult(MetadataIndex(each.name), each.nbytes, each) for each in files]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest of all processes' results and publish the checkpoint."""
        assert self._partial is not None
        manifest = _manifest(metadata, [result for rank_results in results for result in rank_results], self.page_bytes)
        newest = max((number for number, _ in list_checkpoints(self.target.parent)), default=0)
        self._partial.publish(manifest, newest + 1)
        self._partial = None

    def abandon(self) -> None:
        """Remove the hidden folder of a failed save."""
        if self._partial is not None:
            self._partial.abandon()
            self._partial = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP must not choose this writer from a path."""
        return False


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _manifest(metadata: Metadata, results: Sequence[WriteResult], page_bytes: int) -> Manifest:
    files = [result.storage_data for result in results if isinstance(result.storage_data, ManifestFile)]
    numbers = {file.name: number for number, file in enumerate(files)}
    items = {result.index: result.storage_data for result in results if isinstance(result.storage_data, WrittenItem)}
    sizes = {result.index: result.size_in_bytes for result in results}
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            parts = []
            for chunk in stored.chunks:
                item = items[MetadataIndex(name, chunk.offsets)]
                offsets, file = list(chunk.offsets), numbers[item.file]
                parts.append(StoredBox(offsets=offsets, sizes=list(chunk.sizes), file=file, at=item.offset))
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = ManifestTensor(dtype=dtype, shape=list(stored.size), parts=parts)
        else:
            index = MetadataIndex(name)
            number, at = numbers[items[index].file], items[index].offset
            part = StoredBox(offsets=[0], sizes=[sizes[index]], file=number, at=at)
            tensors[name] = ManifestTensor(dtype="uint8", shape=[sizes[index]], parts=[part], plain=True)
    return Manifest(
        processes=sum(file.pages is None for file in files),
        written_by=f"PatrickStar {version('patrickstar')}, PyTorch {torch.__version__}",
        page_bytes=page_bytes,
        files=files,
        tensors=tensors,
    )
