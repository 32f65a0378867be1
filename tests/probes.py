"""Access to an engine's private parts, for tests that inject faults or observe single operations.

All other tests read `engine.inspect()`. No other test file uses `engine._core`, which `test_glossary.py` checks.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.tracer import Tracer
from patrickstar._distributed.collectives import Collectives
from patrickstar._engine.engine import Engine
from patrickstar._hardware.job_queue import Job, WorkerTransfer
from patrickstar._hardware.memory_meter import DeviceMeter
from patrickstar._hardware.ram import Ram, RamLimit
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.precision import LossScaler
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.host_speculation import SpareBlocks
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._tiers.chunk import Chunk

KILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


def manager_of(engine: Engine) -> ChunkManager:
    """Return the chunk manager: memory of chunks, tiers, transfers."""
    return engine._core.manager


def shards_of(engine: Engine) -> LocalShards:
    """Return the managed parameters and this process's shards of their chunks."""
    return engine._core.shards


def tracer_of(engine: Engine) -> Tracer:
    """Return the tracer, with the traces of all kinds of iterations."""
    return engine._core.tracer


def disk_step_of(engine: Engine) -> DiskOptimizerStep | None:
    """Return the optimizer step from disk to disk, None without a disk tier."""
    return engine._core.optimizer_step.updates.disk


def optimizer_step_of(engine: Engine) -> OptimizerStep:
    """Return what updates parameters, on all tiers."""
    return engine._core.optimizer_step


def optimizer_in_backward_of(engine: Engine) -> OptimizerInBackward:
    """Return what updates parameters during backward."""
    return engine._core.optimizer_in_backward


def let_updates_begin(engine: Engine) -> None:
    """Give updates time before the step, however busy processors and disk are: to begin on the host, to end on disk."""
    in_backward, until_s = engine._core.optimizer_in_backward, time.monotonic() + 0.2
    speculation = in_backward.speculation
    while time.monotonic() < until_s:
        undecided = {update: home for update, home in speculation._undecided.items() if not update.given_up}
        begun = any(isinstance(home, SpareBlocks) and home.begun.is_set() for home in undecided.values())
        queued = any(isinstance(home, SpareBlocks) or not update.complete for update, home in undecided.items())
        if begun or not queued:
            return
        speculation.progress()
        in_backward.optimizer_step.updates.progress()
        time.sleep(0.001)


def loss_scaler_of(engine: Engine) -> LossScaler:
    """Return the loss scaler, whose `scale` a test may set."""
    return engine._core.scaler


def collectives_of(engine: Engine) -> Collectives:
    """Return the collectives, whose operations a test may replace."""
    return engine._core.sharing.comm.coordinator.collectives


def fail_at(patch: Any, owner: Any, name: str, number: int, error: BaseException) -> list[Any]:
    """Let the call of this number of a function raise an error; return a list of the calls that others have made."""
    function, calls = getattr(owner, name), []

    def call(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            raise error
        return function(*args)

    patch.setattr(owner, name, call)
    return calls


def complete_updates(engine: Engine) -> None:
    """Wait for deferred updates."""
    engine._core.complete()


def read_state(engine: Engine, name: str, kind: str) -> torch.Tensor:
    """Return a parameter's master or optimizer state, also before its first update."""
    return engine._core.model_state.read(engine._core.by_name[name], kind)


def record_accesses(engine: Engine) -> list[int]:
    """Return a list to which each access from now on appends the bytes of its chunks."""
    data, sizes = engine._core.data, []
    access = data.access

    def record(managed_params: list[ManagedParam], *args: Any, **options: Any) -> None:
        sizes.append(sum({managed.chunk.index: managed.chunk.nbytes for managed in managed_params}.values()))
        access(managed_params, *args, **options)

    data.access = record
    return sizes


def after_allocations(engine: Engine, call: Callable[[Chunk], None]) -> None:
    """Call `call` with the chunk after each allocation of device memory from now on."""
    device = engine._core.manager.device_tier
    allocate = device.allocate
    device.allocate = lambda chunk: (allocate(chunk), call(chunk))


def reduce_early(engine: Engine) -> None:
    """Reduce all gradients of unpinned chunks after each operator, as if the device had no room for them."""
    shards, sharing = engine._core.shards, engine._core.sharing
    end_window = sharing.end_window
    sharing.end_window = lambda accessed: (end_window(accessed), shards.in_backward and sharing.reduce_idle(()))


def after_operators(engine: Engine, call: Callable[[], None]) -> AbstractContextManager[Any]:
    """Call `call` after each operator boundary within the context."""
    data = engine._core.data
    op_boundary = data.op_boundary
    return mock.patch.object(data, "op_boundary", lambda belongs: (op_boundary(belongs), call()))


class PeakMeter(DeviceMeter):
    """Meter of a device that keeps the peaks of allocated and reserved bytes over all restarts."""

    allocated = reserved = 0

    def note(self) -> None:
        """Note the peaks so far."""
        stats = torch.accelerator.memory_stats(self._accelerator.device)
        self.allocated = max(self.allocated, self._accelerator.peak_allocated_bytes)
        self.reserved = max(self.reserved, stats["reserved_bytes.all.peak"])

    def restart(self) -> None:
        self.note()
        super().restart()


# Faults of the disk


def swap_file_descriptor(engine: Engine) -> int:
    """Return the file descriptor of the swap file."""
    return engine._core.manager.disk_tier.file._fd


def kill_workers(engine: Engine, pool: str, count: int | None = None) -> None:
    """Kill the first `count` worker threads (default: all) of "readers" or "writers" by an exception."""
    for thread in getattr(engine._core.manager.disk_tier, pool)._queue.threads[:count]:
        assert KILL(thread.ident, SystemExit, None) == 1


def fail_reads(engine: Engine, label: str, error: Exception) -> None:
    """Let all reads of one chunk from disk fail from now on."""
    readers = engine._core.manager.disk_tier.readers
    submit = readers.submit

    def fail(stage: torch.Tensor) -> None:
        raise error

    def submit_failing(jobs: Sequence[Job], own_label: str, **options: Any) -> WorkerTransfer:
        return submit([fail] * len(jobs) if own_label == label else jobs, own_label, **options)

    readers.submit = submit_failing


@contextmanager
def equal_device_bytes() -> Iterator[None]:
    """Assert, whenever linked processes exchange a measurement, that their chunks occupy the same bytes."""
    agreed = Tracer._agreed

    def checked(tracer: Tracer, nbytes: int) -> int:
        if tracer.linked is not None:
            settled_bytes = tracer.manager.cache.settled_bytes
            largest, smallest = agreed(tracer, settled_bytes), -agreed(tracer, -settled_bytes)
            assert largest == smallest, f"chunks occupy {smallest} to {largest} bytes of linked processes' devices"
        return agreed(tracer, nbytes)

    with mock.patch.object(Tracer, "_agreed", checked):
        yield


def set_ram(monkeypatch: Any, available_bytes: int, total_bytes: int | None = None) -> None:
    """Let the machine have so much memory, of which other programs have left a part; by default all."""
    limit = RamLimit(available_bytes if total_bytes is None else total_bytes, available_bytes)
    monkeypatch.setattr("patrickstar._tiers.hardware.measure_ram", lambda: Ram((limit,)))


def wait_until_another_waits(engine: Engine, other: Future[Any]) -> None:
    """Wait until `other`, a call in another thread, waits for the engine, which this thread uses, or has ended."""
    while not engine._core.interceptor.lock._queue and not other.done():
        time.sleep(0)
