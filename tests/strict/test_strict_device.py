"""The strict device itself: what it must not let pass."""

import gc
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import strict_device
import torch

from patrickstar._hardware.workspaces import join_to_the_end

DEVICE = torch.device("strict", 0)


@pytest.fixture(autouse=True)
def _late_schedule():
    """Run the default stream's work only when something waits for it."""
    gc.collect()
    for seed in range(100):
        strict_device.configure(seed=seed)
        probe = torch.zeros(1, device=DEVICE)
        for _ in range(100):  # a queue that is run now and then would pass fewer
            probe.add_(1)
        if strict_device.extension.pending_tasks() > 100:
            break
    else:
        raise AssertionError("no schedule is late")
    torch.accelerator.synchronize()
    strict_device.extension.reset_host_waits()


@contextmanager
def side_stream(ordered: bool = True, stream: torch.Stream | None = None):
    """Issue work on another stream, by request ordered after the current one."""
    stream, previous = stream or torch.Stream(device=DEVICE), torch.accelerator.current_stream(0)
    if ordered:
        stream.wait_stream(previous)
    torch.accelerator.set_stream(stream)
    yield stream
    torch.accelerator.set_stream(previous)


def page_locked(numel: int) -> torch.Tensor:
    return torch.zeros(numel, pin_memory=True)


def test_operators_run_when_they_are_waited_for():
    value = torch.ones(4, device=DEVICE)
    assert strict_device.extension.pending_tasks() > 0
    assert value.sum().item() == 4


def test_the_host_cannot_read_device_memory():
    program = "import sys; sys.path.insert(0, sys.argv[1]); import ctypes, strict_device, torch\n"
    program += "ctypes.string_at(torch.ones(4, device='strict').data_ptr(), 4)\n"
    root = str(Path(__file__).parents[1])
    ended = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program, root], capture_output=True, text=True)
    assert ended.returncode == -11 and "Segmentation fault" in ended.stderr and "string_at" in ended.stderr


def test_a_stream_that_does_not_wait_reads_stale_memory():
    value = torch.full((4,), 3.0, device=DEVICE)
    torch.accelerator.synchronize()
    found = []
    for ordered in (False, True):
        value.add_(1)
        with side_stream(ordered) as stream:
            copy = value.clone()
            stream.synchronize()
        torch.accelerator.synchronize()
        found.append(copy.sum().item())
    assert found == [4 * 3, 4 * 5]


def test_memory_that_is_freed_and_read_on_another_stream_holds_nan():
    found = []
    for guarded in (False, True):
        value = torch.full((256,), 3.0, device=DEVICE)
        with side_stream() as stream:
            copy = value.clone()
        if guarded:
            value.record_stream(stream)
        del value
        torch.zeros(256, device=DEVICE).sum().item()  # reuses the memory
        torch.accelerator.synchronize()
        found.append(copy.sum().item())
    assert found[1] == 768 and found[0] != 768


def test_a_late_copy_reads_its_source_late_and_keeps_it_alive_and_its_target_holds_nan_until_it_has_run():
    on_device, on_host = torch.full((512,), 3.0, device=DEVICE), page_locked(512)
    on_host.copy_(on_device, non_blocking=True)
    assert on_host.isnan().all()
    torch.accelerator.synchronize()
    assert (on_host == 3).all()
    source, target = page_locked(512), torch.zeros(512, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(5)
    assert (target == 5).all().item()
    target.copy_(torch.full((512,), 3.0).pin_memory(), non_blocking=True)
    again = page_locked(512).fill_(7)
    assert (target == 3).all().item() and (again == 7).all()


def test_registered_memory_is_not_unregistered_under_a_copy():
    memory = torch.zeros(1024)
    strict_device.extension.register_host(memory.data_ptr(), memory.nbytes)
    target = torch.zeros(1024, device=DEVICE)
    target.copy_(memory, non_blocking=True)
    with pytest.raises(RuntimeError, match="unregistered while a copy uses it"):
        strict_device.extension.unregister_host(memory.data_ptr())
    torch.accelerator.synchronize()
    strict_device.extension.unregister_host(memory.data_ptr())


def test_waits_are_counted_by_what_was_called():
    """By some schedules the work has ended before the wait."""
    waits = []
    for seed in range(20):
        strict_device.configure(seed=seed)
        strict_device.extension.reset_host_waits()
        value = torch.ones(512, device=DEVICE)
        value.sum().item()
        value.add_(1)
        value.cpu()
        event = torch.Event(device=DEVICE)
        value.add_(1)
        event.record()
        event.synchronize()
        event.synchronize()
        value.add_(1)
        torch.accelerator.synchronize()
        waits.append(strict_device.extension.host_waits())
        assert strict_device.host_waits() == sum(waits[-1].values()) - waits[-1]["op"]
    assert {"event": 1, "stream": 1, "copy": 1, "op": 1} in waits
    assert all(max(each.values()) <= 1 for each in waits)


def test_a_full_device_is_out_of_memory():
    held = torch.accelerator.memory_allocated(0)
    strict_device.configure(capacity=held + (1 << 20))
    values = [torch.zeros(1 << 16, device=DEVICE) for _ in range(3)]
    text = f"Tried to allocate 524288 bytes; {held + 786432} of {held + 1048576} bytes"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        torch.zeros(1 << 17, device=DEVICE)
    del values
    torch.zeros(1 << 17, device=DEVICE)
    assert torch.accelerator.memory_allocated(0) == held


def test_memory_fragments_if_it_is_asked_to():
    before = torch.accelerator.memory_stats(0)
    reserved = before["reserved_bytes.all.current"]
    strict_device.configure(capacity=reserved + (1 << 20), segment_bytes=1 << 19)
    values = [torch.zeros(1 << 15, device=DEVICE) for _ in range(8)]
    del values[::2]
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 16, device=DEVICE)
    stats = torch.accelerator.memory_stats(0)
    assert stats["inactive_split_bytes.all.current"] - before["inactive_split_bytes.all.current"] == 1 << 19
    assert stats["num_alloc_retries"] > before["num_alloc_retries"]


def test_a_storage_can_be_freed_and_allocated_again_under_its_views():
    held = torch.accelerator.memory_allocated(0)
    storage = torch.empty(0, dtype=torch.uint8, device=DEVICE).untyped_storage()
    storage.resize_(1024)
    view = torch.empty(0, device=DEVICE).set_(storage, 0, (256,), (1,))
    storage.resize_(0)
    assert torch.accelerator.memory_allocated(0) == held
    with pytest.raises(RuntimeError, match="would take 1024 bytes of a storage of 0"):
        torch.empty(0, device=DEVICE).set_(storage, 0, (256,), (1,))
    storage.resize_(1024)
    assert view.fill_(3).sum().item() == 768


def test_threads_have_a_current_device_of_their_own():
    seen = []
    torch.accelerator.set_device_index(1)
    thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert seen == [0] and torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index(0)


@pytest.mark.parametrize("seed", range(8))
def test_a_model_trains_as_on_the_cpu(seed):
    """Operators agree with the CPU's in all but the last bits, by any schedule."""
    strict_device.configure(seed=seed)
    batch = torch.randn(5, 8)

    def losses(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4)
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(batch.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [loss.cpu() for loss in found]

    torch.testing.assert_close(losses("cpu"), losses("strict"))


def reserved(which: str = "current") -> int:
    return torch.accelerator.memory_stats(0)[f"reserved_bytes.all.{which}"]


def kib(count: float) -> torch.Tensor:
    return torch.zeros(int(count * 1024), dtype=torch.uint8, device=DEVICE)


def test_segments_expand_page_by_page():
    """Small blocks share pages of 2 KiB, others pages of 20 KiB; free pages go back, those in use in part stay."""
    strict_device.configure(small_bytes=1024)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(0)
    before = reserved()

    def grown() -> int:
        return (reserved() - before) >> 10

    small = [kib(0.5), kib(0.5)]
    assert grown() == 2
    first, second = kib(15), kib(15)
    assert grown() == 42, "the second block is on two pages"
    third = kib(10)
    assert grown() == 42, "it fits behind them"
    del first
    torch.accelerator.empty_cache()
    assert grown() == 42, "its page has a part of the second block"
    del second
    torch.accelerator.empty_cache()
    assert grown() == 22, "the third block keeps its page"
    first = kib(20)
    assert grown() == 42, "free addresses get memory again"
    del small, first, third
    torch.accelerator.empty_cache()
    assert (reserved(), reserved("peak")) == (before, before + (42 << 10))


def test_at_its_limit_the_allocator_frees_its_cache():
    """It compares the bytes that are asked for, and then takes whole pages."""
    strict_device.configure(small_bytes=1024)
    held = reserved()
    strict_device.limit(held + (50 << 10))
    retries = torch.accelerator.memory_stats(0)["num_alloc_retries"]
    try:
        cached = kib(15)
        with side_stream():
            other = kib(15)
        del cached
        longer = kib(30)
        assert reserved() == held + (60 << 10) and other.numel() < longer.numel()
        assert torch.accelerator.memory_stats(0)["num_alloc_retries"] == retries + 1
        with pytest.raises(torch.OutOfMemoryError):
            kib(30)
    finally:
        strict_device.limit(strict_device.UNLIMITED)


def test_products_keep_a_workspace_for_each_thread_and_stream():
    """A new thread takes over the handle of one that has ended, with its workspaces; a product that adds has two."""
    strict_device.configure(workspace_bytes=32 << 10)
    x, bias = torch.ones(8, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    side = torch.Stream(device=DEVICE)

    def product():
        x @ x

    def on_side():
        with side_stream(stream=side):
            x @ x

    def grown(operation, in_thread=False):
        before = torch.accelerator.memory_allocated(0)
        if in_thread:
            thread = threading.Thread(target=operation)
            thread.start()
            join_to_the_end(thread)
        else:
            operation()
        return (torch.accelerator.memory_allocated(0) - before) >> 10

    operations = [product, lambda: x.mv(bias), lambda: torch.nn.functional.linear(x, x, bias), on_side]
    assert [grown(operation) for operation in operations] == [32, 0, 1, 32]
    assert [grown(operation, in_thread=True) for operation in (product, product, on_side)] == [32, 0, 32]
    strict_device.configure()
    assert torch.accelerator.memory_allocated(0) < 32 << 10
