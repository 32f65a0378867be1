"""Chunks that a checkpoint refers to where they are on the disk, instead of writing them again."""

import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from patrickstar._checkpoint.manifest import ZEROS, ManifestFile, ManifestPages
from patrickstar._checkpoint.save_planner import TensorShard, list_kind
from patrickstar._params.local_shards import LocalShards
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import DiskTier


class PageReferences:
    """Pages of the chunks on disk that hold shards of a checkpoint. See [Note: pages of checkpoints].

    Attributes:
        at: Byte offset of each referenced shard, by number, in the file that the pages form.
    """

    def __init__(self, shards: Sequence[TensorShard], data: LocalShards, folder: Path) -> None:
        self.at: dict[int, int] = {}
        self.chunks: dict[Chunk, int] = {}
        """Chunks that are referred to, each with the offset of its first byte in that file."""
        disk = data.manager.disk_tier
        assert disk is not None
        self._file = disk.file
        self._pages: list[tuple[int, int]] = []
        nbytes = 0
        for number, shard in enumerate(shards):
            chunk = _chunk_on_disk(shard, data)
            if chunk is None:
                continue
            if chunk not in self.chunks:
                self.chunks[chunk], nbytes = nbytes, nbytes + chunk.nbytes
                self._pages += disk.pages_of(chunk)
            assert shard.stored is not None
            element = shard.stored.managed.location.offset + shard.stored.span.start
            self.at[number] = self.chunks[chunk] + element * chunk.dtype.itemsize
        self._held = self._file.hold([page for page in self._pages if disk.is_written(page[0])], folder)

    def link(self, path: Path) -> ManifestFile:
        """Wait until the pages are on the disk, and link the swap file to a path. Raises DiskError.

        Returns:
            The file that the pages form, which is as long as their unpacked bytes.
        """
        found = self._file.persist(self._held, path)
        stored = {page.offset: (page.place, *each) for page, each in zip(self._held.pages, found, strict=True)}
        table = [stored.get(offset, (ZEROS, 0, 0)) for offset, _ in self._pages]
        pages = ManifestPages(
            places=[place for place, _, _ in table],
            sizes=[nbytes for _, nbytes in self._pages],
            stored=[nbytes for _, nbytes, _ in table],
        )
        sums = [f"{checksum:016x}" for _, _, checksum in table]
        return ManifestFile(name=path.name, nbytes=sum(pages.sizes), sums=sums, pages=pages)

    def end(self, *, saved: bool) -> None:
        """Note that the checkpoint is complete, or will never be."""
        if saved:
            self._held.complete = True
        else:
            self._file.release(self._held)


def can_refer(disk: DiskTier | None, folder: Path) -> bool:
    """Return whether a checkpoint that will be in a folder can refer to pages of the swap file.

    A swap file for it on another file system is a warning: then the checkpoint has copies.
    """
    if disk is None or not disk.file.durable:
        return False
    while not folder.exists():
        folder = folder.parent
    if os.stat(folder).st_dev == os.stat(disk.file.directory).st_dev:
        return True
    _warn_of_copies(str(disk.file.directory))
    return False


def copied_bytes(shards: Sequence[TensorShard], data: LocalShards, folder: Path) -> int:
    """Return the bytes that a checkpoint in a folder has to write, besides pages that it refers to."""
    refers = can_refer(data.manager.disk_tier, folder)
    return sum(shard.nbytes for shard in shards if not refers or _chunk_on_disk(shard, data) is None)


@cache  # once per directory
def _warn_of_copies(directory: str) -> None:
    warnings.warn(
        f"checkpoints are written in whole: with durable=True they refer to pages on disk only if they are on the file "
        f"system of {directory}; save to a folder there",
        stacklevel=4,
    )


def _chunk_on_disk(shard: TensorShard, data: LocalShards) -> Chunk | None:
    """Return the chunk of a shard whose bytes are consecutive in pages on the disk."""
    if shard.stored is None or not shard.stored.in_order or not shard.box.numel:
        return None
    chunk = data.chunk_of(shard.stored.managed, list_kind(shard.stored.managed, shard.kind))
    return chunk if chunk.disk.valid and not shard.stored.managed.restores(shard.kind) else None
