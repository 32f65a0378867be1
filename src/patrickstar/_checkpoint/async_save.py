"""Asynchronous save: write a checkpoint while training continues."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from patrickstar._checkpoint.dcp_calls import save
from patrickstar._checkpoint.page_references import PageReferences, can_refer
from patrickstar._checkpoint.safetensors_file import SafetensorsFile
from patrickstar._checkpoint.save_planner import (
    ShardSavePlanner,
    TensorShard,
    list_kind,
    page_slices,
    read_slice,
    saved_kinds,
)
from patrickstar._checkpoint.storage_writer import CheckpointWriter
from patrickstar._hardware.job_queue import WorkerThread
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.sigint_gate import interruptible, interruption_point, uninterruptible
from patrickstar._hardware.transfer import Deferred
from patrickstar._layout.schema import PARAM16
from patrickstar._params.local_shards import LocalShards
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import CheckpointError, PatrickStarError

POLL_S = 0.02
"""Seconds between two checks that the save thread is alive."""

# [Note: saving beside training]
# Master parameters and optimizer states change only in updates. They are therefore written page by page, between
# operators of the following forward and backward passes, as fast as the disk accepts pages. Bytes in host memory are
# written without a copy; only bytes that are elsewhere or not contiguous pass through a few buffer pages, to which an
# accelerator copies beside its work. Before a chunk is updated, its remaining pages are passed to the writer and waited
# for. Only the training thread reads chunks; the save thread plans with the other processes, writes the manifest and
# waits for the bytes.
#
# With `ps.Disk(durable=True)` the checkpoint refers to the pages of chunks on disk: they are not written again. New
# content of these pages goes elsewhere, which is free once the checkpoint before has been deleted. So updates of these
# chunks wait until this checkpoint is complete. See [Note: pages of checkpoints]. Updates that end beside the next
# forward are not hurried: plain data and buffers are copied at once, and the save of the rest starts when the next
# backward does.


class AsyncSave:
    """One checkpoint in progress. Buffers a few pages of `page_bytes`.

    `done` is called on the save thread once the checkpoint is complete.
    """

    def __init__(
        self,
        target: Path,
        shards: Sequence[TensorShard],
        data: LocalShards,
        group: dist.ProcessGroup | None,
        *,
        page_bytes: int,
        done: Callable[[], None] | None,
    ) -> None:
        self.target = target
        self.data = data
        self.error: BaseException | None = None
        self._references = PageReferences(shards, data, target) if can_refer(data.manager.disk_tier, target) else None
        referenced = set() if self._references is None else self._references.at.keys()
        self._shards = written = [shard for number, shard in enumerate(shards) if number not in referenced]
        self._page_bytes = page_bytes
        self._file: SafetensorsFile | None = None
        self._ready, self._all_copied = threading.Event(), threading.Event()
        self._copy_error: BaseException | None = None
        """Failure of the training thread while it copied bytes."""
        self._slices = self._all_slices()
        self._remaining = Counter(shard.managed.location.chunk for shard in written if shard.managed is not None)
        """Number of shards per chunk that are not copied yet."""
        self._next = next(self._slices, None)
        firsts = {
            number: next(read_slice(shard, data, slice(0, 1)))
            for number, shard in enumerate(written)
            if shard.box.numel and self._owner(shard) is not None
        }
        on_host = {number: first.data_ptr() for number, first in firsts.items() if first.device.type == "cpu"}
        accelerator = data.manager.hardware.accelerator
        writer = CheckpointWriter(
            target, self._fill, on_host, self._references, page_bytes=page_bytes, accelerator=accelerator
        )
        planner = ShardSavePlanner(shards, data)

        def run() -> None:
            saved = False
            try:
                data.manager.hardware.enter_worker()
                save(writer, planner, group)
                saved = True
                if self._references is not None:
                    self._references.end(saved=True)
                if done is not None:
                    done()
                if group is not None:
                    dist.barrier(group)  # rank 0 has deleted old checkpoints, whose pages are free then
            except (PatrickStarError, dist.DistError) as error:
                self.error = error
            except Exception as error:
                # In a group, a RuntimeError may mean that a process died; the caller names that process.
                peer_error = isinstance(error, RuntimeError) and group is not None
                self.error = error if peer_error else _incomplete_error(target, error)
            finally:
                if self._references is not None and not saved:
                    self._references.end(saved=False)
                self._ready.set()

        self._thread = WorkerThread(run, "patrickstar-checkpoint")
        self._thread.start()
        data.reads = {
            index: Deferred(f"a checkpoint's reads of chunks {index}", partial(self._end_reads, index))
            for index in self._remaining
        }
        if self._references is not None:
            indices = {chunk.index for chunk in self._references.chunks}
            data.reads |= {index: Deferred(f"a checkpoint with chunks {index}", self._end_writing) for index in indices}

    def _fill(self, file: SafetensorsFile) -> None:
        """Wait until the training thread has written all bytes to the file. Called on the save thread."""
        self._file = file
        self._ready.set()
        self._all_copied.wait()
        if self._copy_error is not None:
            raise CheckpointError(f"saving {self.target} was cancelled: {self._copy_error}") from self._copy_error

    @property
    def done(self) -> bool:
        return self._thread.ended.is_set()

    @property
    def copied(self) -> bool:
        """True once the save needs nothing more from chunks."""
        return self._next is None or self._copy_error is not None or self.done

    def progress(self) -> None:
        """Copy as much as the disk accepts without waiting."""
        while self._ready.is_set() and not self.copied and self._file is not None and self._file.has_room:
            self._copy_next()

    def _end_reads(self, index: int) -> None:
        """Copy what is left of the chunks of an index, and wait until the writer has read them."""
        with uninterruptible():
            self._copy_while(lambda _: self._remaining[index] > 0)
        for managed in self.data.by_chunk[index][:1]:
            self._release(self.data.chunk_of(managed, list_kind(managed, kind)) for kind in saved_kinds(managed))

    def _end_writing(self) -> None:
        """Wait until the checkpoint is complete, or has failed."""
        with uninterruptible():
            self.copy_all()
            self._thread.ended.wait()

    def copy_all(self) -> None:
        """Copy everything that the checkpoint still needs from chunks."""
        self._copy_while(lambda _: True)

    def _copy_while(self, needed: Callable[[TensorShard], bool]) -> None:
        """Copy while `needed` returns true for the next shard; wait for the disk where necessary."""
        while not self.copied and self._next is not None and needed(self._next[0]):
            interruption_point()
            if self._ready.wait(POLL_S) and not self.copied:
                self._copy_next()

    @staticmethod
    def _release(chunks: Iterable[Chunk]) -> None:
        """Wait until the writer has read what was passed to it of these chunks."""
        for copy in [copy for chunk in chunks for copy in (chunk.device, chunk.host)]:
            if copy.save is not None:
                copy.save.wait()
                copy.save = None

    def copy_volatile(self) -> None:
        """Copy everything but master parameters and optimizer states: user code may write the rest at any time."""
        self._copy_while(lambda shard: shard.managed is None or shard.kind == PARAM16)
        self._release(self.data.manager.chunks.values())

    def finish(self) -> None:
        """Wait for completion. Raises CheckpointError on failure, PyTorch's own error for a lost process."""
        self.copy_all()
        with interruptible():
            self._thread.ended.wait()
        self.data.reads.clear()
        if self.error is not None:
            raise self.error

    def cancel(self, why: str) -> None:
        """Stop reading chunks; discard the checkpoint unless all bytes were copied."""
        if not self.copied:
            self._end(CheckpointError(why))
        self.data.reads.clear()

    def _all_slices(self) -> Iterator[tuple[TensorShard, slice, bool]]:
        for shard in self._shards:
            slices = page_slices(shard, self._page_bytes)
            for number, part in enumerate(slices):
                yield shard, part, number == len(slices) - 1
            if not slices:
                yield shard, slice(0, 0), True

    def _copy_next(self) -> None:
        if self._file is None:  # the save thread failed before it created the file
            self._end(self.error)
            return
        assert self._next is not None
        shard, part, last = self._next
        try:
            with profiler_range("save", shard.name):
                for values in read_slice(shard, self.data, part) if shard.box.numel else ():
                    owner = self._owner(shard)
                    self._file.write(values, owner)
                    if owner is not None:
                        owner.in_use.save = Deferred(f"reads of {owner}", partial(self._file.release, owner))
        except BaseException as error:
            self._end(error)
            if not isinstance(error, CheckpointError):
                raise
            return
        if last and shard.managed is not None:
            self._remaining[shard.managed.location.chunk] -= 1
        self._next = next(self._slices, None)
        if self._next is None:
            self._end(None)

    def _owner(self, shard: TensorShard) -> Chunk | None:
        """Return the chunk if the shard's bytes can be written, or copied by the device, from its memory."""
        if shard.stored is None or not shard.stored.in_order:
            return None
        managed = shard.stored.managed
        chunk = self.data.chunk_of(managed, list_kind(managed, shard.kind))
        return chunk if chunk.in_memory and not managed.restores(shard.kind) else None

    def _end(self, error: BaseException | None) -> None:
        self._next, self._copy_error = None, error
        self._remaining.clear()
        self._all_copied.set()


def _incomplete_error(target: Path, error: BaseException) -> CheckpointError:
    wrapped = CheckpointError(f"{target} could not be written: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
