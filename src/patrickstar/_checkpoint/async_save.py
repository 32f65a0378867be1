"""A checkpoint on its way to the disk, while training goes on or waits for it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from patrickstar._checkpoint.dcp_calls import save
from patrickstar._checkpoint.safetensors_file import SafetensorsFile
from patrickstar._checkpoint.save_planner import (
    ShardSavePlanner,
    TensorShard,
    kinds_of,
    list_kind,
    runs_of,
    values,
)
from patrickstar._checkpoint.storage_writer import CheckpointWriter
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.model_data import ModelData
from patrickstar.errors import CheckpointError, PatrickStarError

POLL_S = 0.02
"""Between two looks whether the other thread lives."""

# [Note: saving beside training]
# Masters and states change in updates alone. So what a checkpoint wants of them is written, page by page, between
# operators of the forward and backward that follow, as the disk takes the pages before. What lies in RAM goes to the
# disk from there; memory beyond is a few pages, for what lies elsewhere or not in a row. Before a chunk is updated,
# what is left of it is handed in, and waited for. The training thread alone knows where chunks are; another one plans
# with the other processes, writes the document, and waits.


class AsyncSave:
    """One checkpoint that is being written.

    It takes a few pages of `page_bytes`. `done` is called in the end, in the other thread, if the
    checkpoint is complete.
    """

    def __init__(
        self,
        target: Path,
        pieces: Sequence[TensorShard],
        data: ModelData,
        group: dist.ProcessGroup | None,
        *,
        page_bytes: int,
        done: Callable[[], None] | None,
    ) -> None:
        self.target = target
        self.data = data
        self.error: BaseException | None = None
        self._pieces = pieces
        self._page_bytes = page_bytes
        self._file: SafetensorsFile | None = None
        self._ready, self._memory_sample = threading.Event(), threading.Event()
        self._failed: BaseException | None = None
        """What went wrong with the bytes, in the training thread."""
        self._runs = self._all_runs()
        self._left = Counter(piece.managed.location.chunk for piece in pieces if piece.managed is not None)
        """How many pieces of each chunk are not copied yet."""
        self._next = next(self._runs, None)
        self._addresses = {
            number: next(values(piece, data, slice(0, 1))).data_ptr()
            for number, piece in enumerate(pieces)
            if piece.box.numel and self._owner(piece) is not None
        }
        writer = CheckpointWriter(target, self, page_bytes=page_bytes)
        planner = ShardSavePlanner(pieces, data)

        def run() -> None:
            try:
                data.manager.hardware.enter_thread()
                save(writer, planner, group)
                if done is not None:
                    done()
            except (PatrickStarError, dist.DistError) as error:
                self.error = error
            except Exception as error:
                # With others it may be that one of them is gone, and then it is told so.
                lost = isinstance(error, RuntimeError) and group is not None
                self.error = error if lost else _incomplete_error(target, error)
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=run, name="patrickstar-checkpoint", daemon=True)
        self._thread.start()

    def addresses(self, items: Sequence[WriteItem]) -> dict[int, int]:
        """Where the pieces began in memory that lay in RAM when this began."""
        return self._addresses

    def fill(self, file: SafetensorsFile, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        """Called in the other thread: wait until all bytes are in the file."""
        self._file = file
        self._ready.set()
        self._memory_sample.wait()
        if self._failed is not None:
            raise CheckpointError(f"{self.target} was given up: {self._failed}") from self._failed

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    @property
    def copied(self) -> bool:
        """Whether nothing is wanted of chunks any more."""
        return self._next is None or self._failed is not None or self.done

    def progress(self) -> None:
        """Copy as much as the disk has room for, without waiting."""
        if not self._ready.is_set():
            return
        while not self.copied and self._file is not None and self._file.file.has_room:
            self._copy_next()

    def before_update(self, index: int) -> None:
        """Have all that is wanted of a chunk copied, which will change."""
        self._copy_wanted(lambda: self._left[index] > 0)
        for managed in self.data.by_chunk[index][:1]:
            for kind in kinds_of(managed):
                self.data.manager[list_kind(managed, kind), index].wait_for_save()

    def copy_all(self) -> None:
        """Want nothing of chunks any more when this returns."""
        self._copy_wanted(lambda: True)
        self._release_chunks()

    def _copy_wanted(self, wanted: Callable[[], bool]) -> None:
        """Copy, waiting for the disk where need be."""
        while not self.copied and wanted():
            self._wait_for_file()
            if not self.copied:
                self._copy_next()

    def _release_chunks(self) -> None:
        for chunk in self.data.manager.chunks.values():
            chunk.wait_for_save()

    def copy_volatile(self) -> None:
        """Want nothing but masters and states when this returns: the rest may be written to at any time."""
        self._copy_wanted(lambda: self._next is not None and self._may_change(self._next[0]))
        self._release_chunks()

    @staticmethod
    def _may_change(piece: TensorShard) -> bool:
        return piece.managed is None or not piece.managed.schema.trained

    def finish(self) -> None:
        """Wait until it is complete. Raises CheckpointError if it failed, and what PyTorch does for a lost process."""
        self.copy_all()
        while not self.done:
            self._thread.join(POLL_S)
        if self.error is not None:
            raise self.error

    @defer_sigint
    def cancel(self, why: str) -> None:
        """Nothing more is read of chunks; nothing comes of it, unless it was all there."""
        if not self.copied:
            self._end(CheckpointError(why))
        self._release_chunks()

    def _wait_for_file(self) -> None:
        while not self._ready.wait(POLL_S) and not self.done:
            pass

    def _all_runs(self) -> Iterator[tuple[TensorShard, slice, bool]]:
        for piece in self._pieces:
            runs = runs_of(piece, self._page_bytes)
            for number, run in enumerate(runs):
                yield piece, run, number == len(runs) - 1
            if not runs:
                yield piece, slice(0, 0), True

    @defer_sigint
    def _copy_next(self) -> None:
        if self._file is None:  # the other thread has ended before there was one
            self._end(self.error)
            return
        assert self._next is not None
        piece, run, last = self._next
        try:
            for part in values(piece, self.data, run) if piece.box.numel else ():
                owner = self._owner(piece)
                self._file.write(part, owner)
                if owner is not None:
                    owner.save_reader = self._file.file
        except BaseException as error:
            self._end(error)
            if not isinstance(error, CheckpointError):
                raise
            return
        if last and piece.managed is not None:
            self._left[piece.managed.location.chunk] -= 1
        self._next = next(self._runs, None)
        if self._next is None:
            self._end(None)

    def _owner(self, piece: TensorShard) -> Chunk | None:
        """The chunk in whose memory a piece lies as it is written, from where a writer can take it."""
        if piece.managed is None or not piece.managed.row_major:
            return None
        chunk = self.data.manager[list_kind(piece.managed, piece.kind), piece.managed.location.chunk]
        on_gpu = chunk.device_valid and chunk.device.type != "cpu"
        return chunk if chunk.in_memory and not on_gpu else None

    def _end(self, failed: BaseException | None) -> None:
        self._next, self._failed = None, failed
        self._left.clear()
        self._memory_sample.set()


def _incomplete_error(target: Path, error: BaseException) -> CheckpointError:
    told = CheckpointError(f"{target} could not be written: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
