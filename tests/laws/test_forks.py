"""Children created by fork(): they do not inherit the chunks' memory, and both they and the engine work on."""

import ctypes
import gc
import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from seeded import engine_of
from torch import nn
from torch.utils.data import DataLoader, Dataset
from toys import train

import patrickstar as ps
from patrickstar._checkpoint.direct_writer import DirectWriter
from patrickstar._hardware import vm_pool as pages
from patrickstar._hardware.vm_pool import SYSTEM_PAGE, PagePool, VMRange, can_move_pages
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._tiers.host_arena import HostArena

from .models import config

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux can exclude memory from children"),
    # Since Python 3.12: engines have threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def inherited(address: int, nbytes: int) -> list[str]:
    """Return the mappings of this address range that a child would inherit, from /proc/self/smaps."""
    mappings, covered, current = [], 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(part, 16) for part in span.groups())
            overlap = min(high, address + nbytes) - max(low, address)
            current = line if overlap > 0 else ""
            covered += max(0, overlap)
        elif current and line.startswith("VmFlags:") and "dc" not in line.split():
            mappings.append(f"{current} {line}")
    assert covered == nbytes, "a part of the range is not mapped"
    return mappings


def in_child(function: Callable[[], object], seconds: int = 600) -> int:
    """Run a function in a forked child; return its exit status, or minus the signal number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(seconds)
            function()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# Memory


def test_the_host_arena_and_buffers_of_checkpoints_and_worker_threads_are_not_inherited(tmp_path):
    arena = HostArena(10 * SYSTEM_PAGE)
    assert not inherited(arena.memory.data_ptr(), 10 * SYSTEM_PAGE)
    arena.free(arena.allocate(8 * SYSTEM_PAGE), for_good=True)
    assert not inherited(arena.memory.data_ptr(), 10 * SYSTEM_PAGE)
    file = DirectWriter(tmp_path / "file", 100, page_bytes=SYSTEM_PAGE)
    assert not inherited(file._buffers.data_ptr(), file._buffers.numel())
    file.abandon()
    pool, buffers, barrier = WorkerPool(2, "test", 3 * SYSTEM_PAGE), [], threading.Barrier(2)

    def job(buffer: torch.Tensor) -> None:
        buffers.append(buffer)
        barrier.wait()

    pool.submit([job, job], "nothing").wait()
    assert len({buffer.data_ptr() for buffer in buffers}) == 2
    for buffer in buffers:
        assert not inherited(buffer.data_ptr(), buffer.numel())
    pool.close()


@pytest.mark.skipif(not can_move_pages(), reason="this system can't move pages")
def test_ranges_are_not_inherited_after_their_pages_have_moved():
    pool, ranges = PagePool(), [VMRange(8 * SYSTEM_PAGE), VMRange(5 * SYSTEM_PAGE), VMRange(11 * SYSTEM_PAGE)]
    first, second, third = ranges
    for move in (
        lambda: None,
        lambda: pool.commit(first),
        lambda: pool.decommit(first),
        lambda: pool.commit(second),  # gets a part of the first range's pages
        lambda: pool.commit(third),  # the rest, and new pages
        lambda: (pool.decommit(third), pool.trim(2 * SYSTEM_PAGE)),
        lambda: pool.commit(first),
        lambda: pool.release(second),
    ):
        move()
        for memory in ranges:
            assert not inherited(memory.address, memory.nbytes)


def test_a_child_keeps_its_own_mappings_at_addresses_of_its_parent():
    """Finalizers of the parent's memory do not unmap the child's memory."""

    def use_the_addresses() -> None:
        nonlocal memory, arena
        addresses = [(memory.address, memory.nbytes), (arena.memory.data_ptr(), 4 * SYSTEM_PAGE)]
        for address, nbytes in addresses:
            flags = pages.RESERVE | pages._MAP_FIXED
            assert pages._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
            ctypes.memset(address, 7, nbytes)
        memory = arena = None
        gc.collect()
        for address, nbytes in addresses:
            assert ctypes.string_at(address, nbytes) == b"\7" * nbytes

    memory, arena = VMRange(4 * SYSTEM_PAGE), HostArena(4 * SYSTEM_PAGE)
    assert in_child(use_the_addresses) == 0


# Engines


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 800), nn.Tanh(), nn.Linear(800, 3))


def new_engine(**options: object) -> ps.Engine:
    return engine_of(build, config("bf16", 4096, **options), evict_everything=True)


def step(engine: ps.Engine) -> float:
    return train(engine, [(torch.ones(2, 6),)])[0].item()


def test_a_child_gets_an_error_if_it_uses_the_engine_and_none_if_it_drops_or_closes_it():
    engine = new_engine()
    losses = [step(engine)]
    model = engine.module

    def drop() -> None:
        nonlocal engine
        engine = None
        gc.collect()

    def drop_the_model_too() -> None:
        nonlocal model
        model = None
        drop()

    def use() -> None:
        weight = engine.module[0].weight
        for call in (lambda: engine(torch.ones(2, 6)), engine.state_dict, engine.optimizer.step, weight.norm):
            with pytest.raises(ps.errors.TrainingError, match=rf"memory of process {os.getppid()}.*made by fork"):
                call()

    for function in (lambda: None, use, drop, drop_the_model_too, lambda: engine.close()):
        assert in_child(function) == 0, function
        losses.append(step(engine))
    assert engine.optimizer is not None
    expected = new_engine()
    assert losses == [step(expected) for _ in losses]
    ps.testing.assert_same_bits(expected.state_dict(), engine.state_dict(), "parameters")


class Numbers(Dataset):
    """Rows of random numbers that depend only on their index."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 6 == 0:
            gc.collect()
        return torch.randn(6, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("room", ["plenty", "evicted"])
def test_data_loader_workers_do_not_change_results(room):
    def script(trainer, optimizer):
        losses = []
        for _ in range(2):  # the second pass forks while chunks have been in use
            for batch in DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context="fork"):
                losses += train(trainer, [(batch,)])
        assert len(losses) == 8
        return losses

    budget = {"device_memory": "1MiB", "host_memory": "1MiB"} if room == "plenty" else {}
    options = ps.Config(device="cpu", chunk_size=4096, activation_offload=True, **budget)
    ps.testing.compare(build, options, script)
