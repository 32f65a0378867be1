"""Engines with budgets so small that they need a disk, and comparisons with the reference."""

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import toys
from distributed.ranks import fork_server
from hypothesis import reject
from hypothesis import strategies as st
from probes import complete_updates, disk_step_of, manager_of, record_accesses
from seeded import assert_same_model, engine_of, reference_of
from torch import nn
from toys import layers, mean_square, train

import patrickstar as ps
from patrickstar._tiers.chunk import Chunk

from .models import shapes

WIDTH = 64
"""Width of the models: the model data must exceed the 60 KiB of host buffers, or no disk is used."""
PAGE_BYTES = 4096
LINKED = "rank-00000.chunks"
"""File of a checkpoint that is a link to the swap file."""
ADAMW = ps.AdamW(lr=1e-2, weight_decay=0.1)

Build = Callable[[], nn.Module]

chunk_sizes = st.sampled_from([1000, 9000, 40000, "auto"])
"""Chunks with one parameter, pages with several parameters, chunks with several pages, and few large chunks."""


@dataclass(frozen=True)
class Room:
    """Budgets beyond the smallest that work, and whether every evictable chunk is evicted at each access."""

    device_bytes: int = 0
    host_bytes: int = 0
    host_share: float = 0.0
    """Share of the optimizer chunks that the host can hold in addition."""
    evict_everything: bool = False


rooms = st.builds(
    Room,
    device_bytes=st.sampled_from([0, 0, 700, 12000, 60000]),
    host_bytes=st.integers(0, 40000),
    host_share=st.sampled_from([0.0, 0.0, 0.2, 0.5]),
    evict_everything=st.booleans(),
)


def blocks(count: int = 6) -> nn.Sequential:
    """Build a sequence of equal layers."""
    return layers(WIDTH, count, nn.Tanh)


many_blocks = partial(blocks, 16)
"""A model whose model data exceeds the host's buffers: a page of 8-bit states is at least a block of the disk."""
inputs = partial(toys.inputs, width=WIDTH)
wide_shapes = shapes.map(lambda shape: replace(shape, width=WIDTH))
"""Models that do not fit on the host."""


def options(precision: str = "bf16", chunk_size: int | str = 9000, **more: Any) -> ps.Config:
    """Return a CPU configuration, with AdamW by default."""
    return ps.Config(device="cpu", precision=precision, chunk_size=chunk_size, **{"optimizer": ADAMW} | more)


def with_budgets(config: ps.Config, device: int | None, host: int | None, disk: ps.Disk | None = None) -> ps.Config:
    """Return the configuration with these budgets."""
    return config.model_copy(update={"device_memory": device, "host_memory": host, "disk": disk})


def small_engine(build: Build, config: ps.Config, **hooks: Any) -> ps.Engine:
    """Create an engine from seed 0 with the smallest page size that a disk supports."""
    return engine_of(build, config, page_bytes=PAGE_BYTES, **hooks)


_least_budgets: dict[Any, tuple[int, int, int]] = {}


def on_disk(build: Build, config: ps.Config, directory: str | Path, batch: tuple[Any, ...], room: Room) -> ps.Config:
    """Return the configuration with budgets that need a disk: the smallest that work, plus `room`."""
    disk, model = ps.Disk(directory=directory), getattr(build, "__self__", build)  # `Shape.build` has an equal shape
    key = model, repr(config), room.device_bytes, bool(room.host_share)
    if key not in _least_budgets:
        device = least_device_bytes(build, config, batch) + room.device_bytes
        optimizer_bytes = 0
        if room.host_share:
            with ps.Engine(build, with_budgets(config, device, None), meter=ps.testing.NoMeter()) as engine:
                optimizer_bytes = engine.layout.optimizer_bytes
        _least_budgets[key] = device, least_host_bytes(build, with_budgets(config, device, 1, disk)), optimizer_bytes
    device, host, optimizer_bytes = _least_budgets[key]
    return with_budgets(config, device, host + room.host_bytes + int(room.host_share * optimizer_bytes), disk)


def durable(config: ps.Config, **more: Any) -> ps.Config:
    return config.model_copy(update={"disk": ps.Disk(config.disk.directory, durable=True, **more)})


def step_of(trainer: Any, batch: tuple[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Train one step, with random numbers that depend on its number alone."""
    torch.manual_seed(step)
    return train(trainer, [batch])


def loaded(build: Build, config: ps.Config, folder: Path) -> ps.Engine:
    """Return an engine of other initial values that has loaded a checkpoint."""
    torch.manual_seed(1)
    hooks = {"meter": ps.testing.NoMeter(), "poison": True, "page_bytes": PAGE_BYTES}
    engine = ps.Engine(build, config, **hooks)
    engine.load(folder)
    return engine


def least_device_bytes(build: Build, config: ps.Config, batch: tuple[Any, ...]) -> int:
    """Return the bytes of chunks that the largest operator accesses together, measured in one step."""
    with ps.Engine(build, with_budgets(config, None, None), meter=ps.testing.NoMeter()) as engine:
        largest = max(chunk.compute_bytes for chunk in engine.layout.chunks)
        sizes = record_accesses(engine)
        engine.backward(mean_square(engine(*batch)))
    return max(largest, *sizes)


def least_host_bytes(build: Build, config: ps.Config) -> int:
    """Return the smallest host budget with this device budget, read from the error for a host of one byte.

    Or, for a disk of some bytes, one more than it lacks.
    """
    try:
        small_engine(build, config).close()
    except ps.errors.BudgetError as error:
        assert error.short_bytes is not None and error.short_bytes > 0, "the error names no missing bytes"
        return 1 + error.short_bytes
    reject()  # everything fits on the device


def compare(
    build: Build, config: ps.Config, script: ps.testing.Script, *, evict_everything: bool = False, **hooks: Any
) -> None:
    """Compare as `testing.compare`, for an engine that needs its disk, and check its counters."""
    reference = reference_of(build, with_budgets(config, None, None))
    expected = script(reference, reference.optimizer)
    with small_engine(build, config, evict_everything=evict_everything, **hooks) as engine:
        if engine.inspect().disk is None:
            reject()
        results = script(engine, engine.optimizer)
        ps.testing.assert_same_bits(list(expected), list(results), "tensors returned by the script")
        assert_same_model(reference, engine)
        assert_at_rest(engine)
    state = reference.state_dict()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach(), state[name]), f"{name}, after the engine was closed"


def assert_at_rest(engine: ps.Engine) -> None:
    """Assert that nothing is pinned, pending or in flight, chunks have valid copies, and counters are right."""
    manager, pool = manager_of(engine), disk_step_of(engine).staging_pool
    complete_updates(engine)
    manager.complete_transfers()
    for pages in pool.live:
        pool.wait(pages.reads)
    file, counters = manager.disk_tier.file, manager.counters
    written_bytes = counters.disk_write_bytes + manager.disk_tier.pop_unplanned_bytes()
    assert (counters.disk_read_bytes, written_bytes) == (file.read_bytes, file.written_bytes)
    assert not any(param.update_pending or param.uses for param in engine.inspect().parameters)
    assert not manager.transfers.in_flight and manager.transfers.evicting_bytes == 0
    for chunk in manager.chunks.values():
        assert not (chunk.pins or chunk.device.writer or chunk.device.reader or chunk.disk.has_writes), (
            f"{chunk} is in use"
        )
    assert_one_owner(manager.chunks.values())
    assert (manager.device_tier.used, manager.host_tier.used) == real_bytes(manager.chunks.values())


def assert_one_owner(chunks: Iterable[Chunk]) -> None:
    """Assert that every chunk has a valid copy, and that duplicate copies agree."""
    for chunk in chunks:
        assert chunk.device.valid or chunk.host.valid or chunk.disk.valid, f"{chunk} has no valid copy"
        assert chunk.device.present or not chunk.device.valid, f"{chunk} has no device memory"
        assert chunk.host.present or not chunk.host.valid, f"{chunk} has no host memory"
        if chunk.device.valid and chunk.host.valid:
            ps.testing.assert_same_bits(
                [chunk.on_device(chunk.whole)], [chunk.on_host(chunk.whole)], f"{chunk} on device and host"
            )


def real_bytes(chunks: Iterable[Chunk]) -> tuple[int, int]:
    """Return the bytes of chunks on the device and on the host."""
    hosts = [chunk.host.memory for chunk in chunks if chunk.host.present]
    return sum(chunk.device_bytes for chunk in chunks), sum(host.numel() * host.element_size() for host in hosts)


def optimizer_bytes_on_disk(engine: ps.Engine) -> int:
    """Return the bytes that an update of all parameters reads from the disk, and writes: pages of lists homed there."""
    nbytes, parameters = 0, engine.inspect().parameters
    for chunk in engine.layout.chunks:
        in_chunk = [param for param in parameters if param.chunk == chunk.index]
        lists = chunk.schema.optimizer_lists
        if any(param.optimizer_tier == "disk" for param in in_chunk):
            length = PAGE_BYTES // lists[0].itemsize
            pages = {page for param in in_chunk for page in pages_of(param.offset, param.numel, length)}
            touched = sum(min(length, chunk.own_numel - page * length) for page in pages)
            nbytes += touched * sum(spec.itemsize for spec in lists)
    return nbytes


def pages_of(offset: int, numel: int, length: int) -> range:
    """Return the pages of `length` elements that these elements are on."""
    return range(offset // length, -(-(offset + numel) // length))


def run_elsewhere(function: Callable[[], object]) -> None:
    """Assert that a function of a module succeeds in a process without the memory of other tests."""
    child = fork_server().Process(target=_with_one_thread, args=(function,), daemon=True)
    child.start()
    child.join()
    assert child.exitcode == 0, "its traceback is above"


def _with_one_thread(function: Callable[..., object], *args: object) -> None:
    gc.freeze()  # what the fork server imported is not searched for garbage
    torch.set_num_threads(1)
    function(*args)


def _print_into(path: Path, trained: Callable[..., ps.Engine], folder: Path) -> None:
    with path.open("w", buffering=1) as sys.stdout:
        trained(folder, 1, 99, True)


def last_save_of_a_killed_run(trained: Callable[..., ps.Engine], folder: Path, until: Callable[..., bool]) -> int:
    """Run `trained(folder, 1, 99, True)` elsewhere; kill it at a line of numbers; return the last saved step."""
    (printed := folder / "printed").touch()
    child = fork_server().Process(target=_with_one_thread, args=(_print_into, printed, trained, folder), daemon=True)
    child.start()
    while not any(until(*map(int, line.split())) for line in printed.read_text().splitlines()):
        assert child.is_alive(), "the run has ended"
        time.sleep(0.005)
    child.kill()
    child.join()
    return max(int(saved.name.split()[1]) for saved in folder.glob("step *") if saved.is_dir())


def check_a_killed_run(trained: Callable[..., ps.Engine], folder: Path, until: Callable[..., bool]) -> None:
    """Assert that a run, killed as in `last_save_of_a_killed_run`, resumes with the bits of one that was not."""
    saved = last_save_of_a_killed_run(trained, folder, until)
    assert saved >= 4
    (undisturbed := folder / "undisturbed").mkdir()
    with trained(undisturbed, 1, saved + 2) as expected, trained(folder, saved + 1, saved + 2) as found:
        assert_same_model(expected, found, "resumed ")


def worker_threads() -> list[str]:
    """Return the worker threads of all engines."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("patrickstar-")]


def open_files() -> int:
    """Return the number of open files of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """Limit the size of files, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
