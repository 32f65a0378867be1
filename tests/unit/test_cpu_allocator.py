"""The allocator of CPU tensors counts them to the byte, and caches freed memory only as far as its limit allows."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch

from patrickstar._hardware import cpu_allocator as module
from patrickstar._hardware import memory_meter
from patrickstar._hardware.cpu_allocator import cpu_allocator
from patrickstar._hardware.memory_meter import AllocatorMeter, ResidentMeter, SampledMeter, host_meter

MIB = 1 << 20


@pytest.fixture
def allocator():
    found = cpu_allocator()
    assert found is not None, "this machine has a compiler"
    return found


@pytest.fixture
def counter(allocator):
    """Return a counter of the test's tensors."""
    gc.collect()  # engines of other tests, which may have limits
    made = allocator.counter()
    yield made
    made.set_limit(None)


@pytest.mark.parametrize("numel", [1, 3, 1000, (128 << 10) // 4 - 1, (128 << 10) // 4, MIB, 3 * MIB + 7])
def test_tensors_are_counted_to_the_byte(allocator, numel):
    before = allocator.live_bytes
    tensor = torch.empty(numel)
    assert allocator.live_bytes - before == 4 * numel
    view = tensor[1:]
    assert allocator.live_bytes - before == 4 * numel
    del tensor
    assert allocator.live_bytes - before == 4 * numel, "a view keeps the memory"
    del view
    assert allocator.live_bytes == before


def test_tensors_begin_at_aligned_addresses_and_keep_their_values(allocator, counter):
    counter.set_limit(64 * MIB)
    for numel in (1, 100, 1 << 15, 1 << 18, 1 << 15, 1 << 18):
        tensor = torch.arange(numel, dtype=torch.int64)
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor[:: max(1, numel // 97)], torch.arange(0, numel, max(1, numel // 97)))


def test_peak_and_its_reset(counter):
    lasting, passing = torch.empty(MIB), torch.empty(2 * MIB)
    del passing
    assert counter.peak_bytes == 12 * MIB
    counter.reset_peak()
    assert counter.peak_bytes == lasting.nbytes


def test_a_counter_counts_the_tensors_that_are_allocated_after_it(allocator):
    older = torch.empty(MIB)
    first = allocator.counter()
    between = torch.empty(2 * MIB)
    second = allocator.counter()
    newer = torch.empty(3 * MIB)
    del older, between
    assert (first.live_bytes, first.peak_bytes) == (12 * MIB, 20 * MIB)
    assert (second.live_bytes, second.peak_bytes) == (12 * MIB, 12 * MIB)
    second.reset_peak()
    del newer
    assert (first.live_bytes, first.peak_bytes) == (0, 20 * MIB)
    assert (second.live_bytes, second.peak_bytes) == (0, 12 * MIB)


def test_memory_of_older_tensors_is_cached_within_the_limit_of_newer_ones(allocator, counter):
    older = torch.empty(16 * MIB)
    newer = allocator.counter()
    newer.set_limit(8 * MIB)
    lasting = torch.empty(MIB)
    del older
    assert lasting.nbytes + allocator.cached_bytes <= 8 * MIB
    newer.set_limit(None)


def test_storages_that_grow_and_shrink_count_and_memory_of_others_does_not(allocator):
    before, tensor = allocator.live_bytes, torch.empty(10)
    tensor.untyped_storage().resize_(10_000)
    assert allocator.live_bytes - before == 10_000
    tensor.untyped_storage().resize_(0)
    assert allocator.live_bytes == before
    tensor = torch.from_numpy(np.zeros(1000))
    assert allocator.live_bytes == before and tensor.numel() == 1000


def test_freed_blocks_are_cached_and_reused_within_the_limit(allocator, counter):
    counter.set_limit(8 * MIB)
    tensor = torch.empty(MIB)
    address = tensor.data_ptr()
    del tensor
    assert 4 * MIB <= allocator.cached_bytes < 4 * MIB + 8192
    tensor = torch.empty(MIB - 1000)
    assert tensor.data_ptr() == address and allocator.cached_bytes == 0
    del tensor
    large = torch.empty(MIB + MIB // 2)
    assert allocator.cached_bytes == 0, "live and cached bytes stay within the limit"
    del large
    counter.set_limit(0)
    assert allocator.cached_bytes == 0


def test_the_smallest_limit_counts_and_nothing_is_cached_without_one(allocator, counter):
    other = allocator.counter()
    counter.set_limit(64 * MIB)
    other.set_limit(2 * MIB)
    del_me = torch.empty(MIB)
    del del_me
    assert allocator.cached_bytes == 0
    other.set_limit(None)
    del_me = torch.empty(MIB)
    del del_me
    assert allocator.cached_bytes > 0
    counter.set_limit(None)
    assert allocator.cached_bytes == 0


def test_out_of_memory_is_pytorchs_error(allocator):
    before = allocator.live_bytes
    for numel in (1 << 55, (1 << 61) + 1):
        with pytest.raises(RuntimeError, match=r"can't allocate memory|overflow"):
            torch.empty(numel)
    assert allocator.live_bytes == before


def test_threads_that_allocate_at_once(allocator, counter):
    counter.set_limit(32 * MIB)
    before = allocator.live_bytes

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            numel = int(torch.randint(1, 1 << 17, (1,), generator=generator))
            tensor = torch.full((numel,), float(seed))
            assert float(tensor[0]) == float(tensor[-1]) == seed

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert allocator.live_bytes == before


def test_a_forked_child_allocates(allocator):
    child = os.fork()
    if not child:
        tensor = torch.empty(MIB)  # no operator: OpenMP's threads do not survive a fork
        tensor.untyped_storage()[4 * MIB - 1] = 7
        os._exit(0 if tensor.untyped_storage()[4 * MIB - 1] == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_meter_counts_above_its_baseline(allocator):
    before, meter = torch.empty(MIB), AllocatorMeter(allocator)
    meter.calibrate(0)
    meter.restart()
    assert (meter.now(0), meter.peak(0)) == (0, 0)
    after = torch.empty(1000)
    assert (meter.now(0), meter.peak(0)) == (4000, 4000)
    del after, before
    assert (meter.now(0), meter.peak(0)) == (0, 4000)
    before = torch.empty(500)
    assert (meter.now(0), meter.peak(0)) == (2000, 4000), "older tensors are not in the baseline's place"
    del before


@pytest.mark.parametrize("broken", ["no compiler", "no permission"])
def test_without_the_allocator_the_process_is_measured_and_it_is_said_once(tmp_path, monkeypatch, broken):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    if broken == "no permission":
        (tmp_path / "patrickstar").write_text("a file in place of the folder")
    monkeypatch.setattr(memory_meter, "cpu_allocator", cache(cpu_allocator.__wrapped__))
    monkeypatch.setattr(module, "native_library", cache(module.native_library.__wrapped__))
    says = r"(?s)counted exactly.*Install a C\+\+ compiler|peaks inside operators"
    with pytest.warns(UserWarning, match=says) as warned:
        kinds = {type(host_meter()) for _ in range(2)}
    assert (kinds, len(warned)) in (({ResidentMeter}, 1), ({SampledMeter}, 3))


def test_the_library_is_compiled_once_for_each_version(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" >> "$0.calls"\nfor last; do :; done\ntouch "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    first = module._compiled()
    assert module._compiled() == first
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert module._compiled() != first
    assert len((tmp_path / "compiler.calls").read_text().splitlines()) == 2
    assert [path.suffix for path in (tmp_path / "patrickstar").iterdir()] == [".so", ".so"]
