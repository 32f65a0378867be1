"""Test CUDA device calls against a fake of PyTorch's: threads, page-locked memory, allocator, default budget."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import MIB, OUT_OF_MEMORY, FakeCuda
from resident_pages import resident_bytes_at

from patrickstar._cli import doctor
from patrickstar._hardware import cuda_accelerator
from patrickstar._hardware.cuda_accelerator import PORTABLE, CudaAccelerator, allocator_settings
from patrickstar._hardware.memory_meter import DeviceMeter
from patrickstar._hardware.vm_pool import fault_in
from patrickstar._perf_model.margins import device_budget
from patrickstar._step.stats import Stats
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import HostArena
from patrickstar._tiers.transfer_counters import TransferCounters

GIB = 1 << 30
SECOND = torch.device("cuda", 1)
PAGE = mmap.PAGESIZE


@pytest.fixture
def small_registrations(monkeypatch):
    """Limit registrations to four pages."""
    monkeypatch.setattr(CudaAccelerator, "max_lock_bytes", 4 * PAGE)


def test_device_without_an_index_is_the_current_one(fake_cuda: FakeCuda):
    fake_cuda.set_device(1)
    device = CudaAccelerator(torch.device("cuda"))
    fake_cuda.set_device(0)
    assert device.index == 1 and device.device == SECOND


def test_disk_threads_start_on_the_device(fake_cuda: FakeCuda, tmp_path):
    hardware = Hardware(SECOND)
    disk = hardware.disk(hardware.swap_file(tmp_path, 1 << 16, True, None), PAGE)
    for pool in (disk.readers, disk.writers):
        pool.submit([lambda stage: None], "a page").wait()
    disk.close()
    assert {index for _, index in fake_cuda.entered} == {1}
    assert {name.rstrip("0123456789") for name, _ in fake_cuda.entered} == {"patrickstar-read-", "patrickstar-write-"}
    assert fake_cuda.device == 0, "the calling thread's device is unchanged"


def test_two_devices_are_independent(fake_cuda: FakeCuda):
    first, second = Hardware(torch.device("cuda", 0)), Hardware(SECOND)
    first.enter_thread()
    assert fake_cuda.device == 0
    second.enter_thread()
    assert fake_cuda.device == 1
    arena = HostArena(PAGE, first.accelerator)
    assert fake_cuda.calls[0][:2] == ("register", 0)
    arena.unlock()
    assert fake_cuda.calls[1:] == [("synchronize", 0), ("unregister", 0, arena.memory.data_ptr())]
    assert fake_cuda.device == 1, "the previous device is current again"


def test_cpu_makes_no_cuda_calls():
    hardware = Hardware(torch.device("cpu"))
    hardware.start()
    hardware.enter_thread()
    assert hardware.accelerator is None
    assert hardware.allocator_report() == "" and hardware.library_bytes(torch.bfloat16) == 0
    assert hardware.allocator_stats().retries == 0


def test_arena_is_page_locked_in_several_registrations(fake_cuda: FakeCuda, small_registrations):
    arena = HostArena(9 * PAGE + 100, CudaAccelerator(SECOND))
    base = arena.memory.data_ptr()
    assert arena.page_locked
    assert fake_cuda.calls == [
        ("register", 1, base, 4 * PAGE, PORTABLE),
        ("register", 1, base + 4 * PAGE, 4 * PAGE, PORTABLE),
        ("register", 1, base + 8 * PAGE, PAGE + 100, PORTABLE),
    ]
    arena.unlock()
    assert not arena.page_locked and not fake_cuda.registered
    calls = len(fake_cuda.calls)
    arena.unlock()
    assert len(fake_cuda.calls) == calls, "a second close has no effect"


def test_blocks_stay_within_one_registration(fake_cuda: FakeCuda, small_registrations):
    arena = HostArena(12 * PAGE, CudaAccelerator(SECOND))
    blocks = [arena.allocate(3 * PAGE) for _ in range(3)]
    assert [block.start // PAGE for block in blocks] == [0, 4, 8]
    assert arena.allocate(3 * PAGE) is None
    between = [arena.allocate(PAGE) for _ in range(3)]
    assert [block.start // PAGE for block in between] == [3, 7, 11]
    arena.free(between[0])
    arena.free(blocks[0])
    arena.compact()
    assert all(block.start // (4 * PAGE) == (block.end - 1) // (4 * PAGE) for block in arena._blocks)
    assert blocks[1].start == 0
    arena.unlock()
    unlocked = HostArena(12 * PAGE)
    assert [unlocked.allocate(3 * PAGE).start // PAGE for _ in range(3)] == [0, 3, 6], "there are no registrations"


def test_refused_page_lock_warns_and_leaves_nothing_locked(fake_cuda: FakeCuda, small_registrations, monkeypatch):
    fake_cuda.lockable_bytes = 8 * PAGE
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", fake_cuda.launch)
    with pytest.warns(UserWarning) as refused:
        arena = HostArena(10 * PAGE, CudaAccelerator(SECOND))
    text = str(refused[0].message)
    assert f"can't page-lock {10 * PAGE} bytes" in text and f"after {8 * PAGE} bytes" in text
    assert f"error {OUT_OF_MEMORY} (out of memory)" in text
    assert "smaller host_memory" in text and "ulimit" not in text
    assert not arena.page_locked and not fake_cuda.registered, "what was locked is unlocked"
    assert not fake_cuda.latched, "the next kernel would have raised the driver's error"
    monkeypatch.setattr(torch, "ones", ones)
    assert arena.allocate(10 * PAGE) is not None
    arena.unlock()
    assert not fake_cuda.registered


def test_memory_is_faulted_in_before_it_is_registered(fake_cuda: FakeCuda, small_registrations, monkeypatch):
    monkeypatch.setattr(cuda_accelerator, "fault_in", lambda *memory: fake_cuda.calls.append(("fault in", *memory)))
    arena = HostArena(5 * PAGE, CudaAccelerator(SECOND))
    base = arena.memory.data_ptr()
    assert [call[0] for call in fake_cuda.calls] == ["fault in", "register", "register"]
    assert fake_cuda.calls[0] == ("fault in", base, 5 * PAGE)
    arena.unlock()


def test_memory_that_could_not_be_locked_is_given_back(fake_cuda: FakeCuda, monkeypatch):
    fake_cuda.lockable_bytes = 0
    monkeypatch.setattr(torch, "ones", fake_cuda.launch)
    faulted_in = []

    def noted(address: int, nbytes: int) -> None:
        fault_in(address, nbytes)
        faulted_in.append(resident_bytes_at(address, nbytes))

    monkeypatch.setattr(cuda_accelerator, "fault_in", noted)
    with pytest.warns(UserWarning, match="can't page-lock"):
        arena = HostArena(10 * PAGE + 1, CudaAccelerator(SECOND))
    assert faulted_in == [11 * PAGE] and resident_bytes_at(arena.memory.data_ptr(), arena.nbytes) == 0


def test_collected_arena_is_unlocked_before_its_memory_is_freed(fake_cuda: FakeCuda):
    arena = HostArena(PAGE, CudaAccelerator(SECOND))
    view = arena.view(arena.allocate(64), torch.uint8)
    assert fake_cuda.registered
    del arena
    gc.collect()
    assert fake_cuda.calls[-2:] == [("synchronize", 1), ("unregister", 1, view.data_ptr())]
    view.fill_(3)
    assert set(view.tolist()) == {3}


def test_meter_reads_allocated_bytes_and_their_peak(fake_cuda: FakeCuda, monkeypatch):
    fake_cuda.allocated = {"allocated": 100 * MIB, "reserved": 130 * MIB, "inactive_split": 7 * MIB}
    meter = DeviceMeter(CudaAccelerator(SECOND))
    assert meter.now(40 * MIB) == 60 * MIB and meter.now(1 << 40) == 0
    assert meter.peak(40 * MIB) == 160 * MIB
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    meter.restart()
    assert reset == [1]
    report = Hardware(SECOND).allocator_report()
    assert all(str(nbytes * MIB) in report for nbytes in (100, 130, 7))


def test_segments_become_expandable_unless_configured(fake_cuda: FakeCuda, monkeypatch):
    device = CudaAccelerator(SECOND)
    assert device.use_expandable_segments() and fake_cuda.configured == ["expandable_segments:True"]
    assert not device.use_expandable_segments(), "configured by now"
    fake_cuda.settings = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert not device.use_expandable_segments()
    fake_cuda.settings = {}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert allocator_settings() == "expandable_segments:False"
    assert not device.use_expandable_segments()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not device.use_expandable_segments()
    assert fake_cuda.configured == ["expandable_segments:True"]


def test_allocator_retries_warn_once(fake_cuda: FakeCuda):
    nothing = SimpleNamespace(peak=0, other_peak=0, spare_peak=0, reset_peak=lambda: None, reset_peaks=lambda: None)
    nothing.budget_bytes, hardware = 5000, Hardware(SECOND)
    manager = SimpleNamespace(device_tier=nothing, host_tier=nothing, disk_tier=None, hardware=hardware, device=SECOND)
    manager.counters, manager.cache = TransferCounters(), SimpleNamespace(resident_bytes=0)
    fake_cuda.retries = 4
    stats = Stats(_retries=hardware.allocator_stats().retries)
    stats.close_step(manager, False, 1.0, 0)
    assert stats.last.allocator_retries == 0, "earlier retries do not count"
    fake_cuda.retries, fake_cuda.allocated["reserved"], fake_cuda.allocated["inactive_split"] = 6, 900, 30
    with pytest.warns(UserWarning, match=r"no memory left 2 times.*5000 bytes.*900 bytes.*Lower device_memory"):
        stats.close_step(manager, False, 1.0, 0)
    fake_cuda.retries, fake_cuda.allocated["reserved"] = 7, 800
    stats.close_step(manager, False, 1.0, 0)
    assert (stats.last.allocator_retries, stats.last.reserved_bytes, stats.last.inactive_split_bytes) == (1, 800, 30)
    assert (stats.total.allocator_retries, stats.total.reserved_bytes) == (3, 900)


def test_the_limit_of_what_is_reserved_belongs_to_the_open_engines(fake_cuda: FakeCuda, monkeypatch):
    """The largest budget applies, the user's own limit stays below it, and comes back."""
    monkeypatch.setattr(cuda_accelerator, "_reserved_limits", {})
    engines = [DeviceMeter(CudaAccelerator(SECOND)) for _ in range(3)]
    parts = [meter.set_aside(budget * GIB) for meter, budget in zip(engines, (10, 20, 90), strict=True)]
    assert engines[0].now(0) == 10 * GIB - parts[0].planned_bytes(10 * GIB) == 10 * GIB - 10 * GIB * 92 // 100
    assert fake_cuda.fraction == 1.0, "an engine that was not created changes nothing"
    limits = []
    for change in (
        lambda: engines[0].limit(1),
        lambda: engines[1].limit(1),
        lambda: engines[0].close(),
        lambda: engines[2].limit(1),
        lambda: engines[2].close(),
        lambda: engines.pop(1) and gc.collect(),
    ):
        change()
        limits.append(round(fake_cuda.fraction * 80 * GIB))
    whole_pages = 18 * MIB
    assert limits[:3] == [10 * GIB - whole_pages, 20 * GIB - whole_pages, 20 * GIB - whole_pages]
    assert limits[3:] == [80 * GIB, 20 * GIB - whole_pages, 80 * GIB]
    fake_cuda.fraction = 0.1
    engines[0].set_aside(10 * GIB)
    engines[0].limit(1)
    assert fake_cuda.fraction == pytest.approx(0.1), "the user's limit is lower"
    fake_cuda.allocated["reserved"] = 11 * GIB
    released = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(True))
    CudaAccelerator(SECOND).limit_reserved(engines[0], 10 * GIB)
    assert released == [True], "what is cached already goes first"
    engines[0].close()
    assert fake_cuda.fraction == pytest.approx(0.1)


def test_reserved_memory_counts_as_free(fake_cuda: FakeCuda):
    fake_cuda.free_bytes, fake_cuda.allocated["reserved"] = 10 * GIB, 6 * GIB
    assert Hardware(SECOND).device_bytes() == device_budget(16 * GIB)
    assert Hardware(SECOND).device_bytes(several=True) == device_budget(16 * GIB, several=True)


def test_doctor_reports_the_device_budget(fake_cuda: FakeCuda, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    first, second = doctor._gpus()
    assert (first.name, second.name) == ("gpu 0", "gpu 1")
    assert f"80.00 GiB free; device_memory is 78.50 GiB ({device_budget(80 * GIB)} bytes) unless" in second.text
    assert "Of it 6.28 GiB are left to fragmentation" in second.text
