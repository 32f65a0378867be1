"""Chunks on disk that a checkpoint's linked files have whole: they are read there, instead of loaded."""

from collections.abc import Iterator

from patrickstar._checkpoint.manifest import ZEROS
from patrickstar._checkpoint.save_planner import list_kind, name_of, saved_kinds
from patrickstar._checkpoint.shard_box import boxes_in
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.linked_file import LinkedFile, LinkedPage


class LinkedChunks:
    """Chunks whose pages a checkpoint has in a linked file on the swap file's file system. See [Note: linked pages].

    Attributes:
        chunks: These chunks, each with its pages there.
    """

    def __init__(self, reader: CheckpointReader, data: LocalShards) -> None:
        self.chunks: dict[Chunk, list[LinkedPage | None]] = {}
        self._disk, self._reader, self._data = data.manager.disk_tier, reader, data
        if self._disk is None:
            return
        opened = {number: self._disk.file.open_linked(reader.path(number)) for number in reader.linked_files}
        files = {number: file for number, file in opened.items() if file is not None}
        for managed_params in data.by_chunk.values() if files else ():
            for kind in saved_kinds(managed_params[0]):
                if managed_params[0].restores(kind):
                    continue
                chunk = data.chunk_of(managed_params[0], list_kind(managed_params[0], kind))
                found = set(self._starts(chunk, managed_params, kind))
                if len(found) == 1 and (start := found.pop()) is not None and (file := files.get(start[0])) is not None:
                    self._add(self._disk, chunk, *start, file)

    def _starts(self, chunk: Chunk, managed_params: list[ManagedParam], kind: str) -> Iterator[tuple[int, int] | None]:
        """Yield, for each box in a chunk, the file that has it and the byte where the chunk would begin there."""
        self._data.manager.transfers.settle(chunk)
        if chunk.in_memory or not chunk.disk.valid:
            return
        for managed in managed_params:
            for stored in boxes_in(managed, slice(0, managed.location.numel)):
                source = self._reader.source(name_of(managed, kind), stored.whole)
                if source is None or source.dtype != chunk.dtype or not stored.in_order:
                    yield None
                else:
                    first = managed.location.offset + stored.span.start
                    yield source.file, source.offset - first * chunk.dtype.itemsize

    def _add(self, disk: DiskTier, chunk: Chunk, number: int, at: int, file: LinkedFile) -> None:
        pages = self._reader.linked_pages(number, at, [nbytes for _, nbytes in disk.pages_of(chunk)])
        if pages is not None and (disk.unpacks(chunk) or not pages.packed):
            self.chunks[chunk] = [
                None if place == ZEROS else LinkedPage(file, place, stored, int(checksum, 16))
                for place, stored, checksum in pages.table
            ]

    def apply(self) -> None:
        """Let the chunks have these pages."""
        for chunk, pages in self.chunks.items():
            assert self._disk is not None
            self._disk.link(chunk, pages)
