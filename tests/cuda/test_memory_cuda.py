"""Memory of a device: budgets, library workspaces, and out of memory. The simulated one has 1/1024 of all sizes."""

import gc
import sys
import time
from functools import partial

import pytest
import torch
from cuda_cases import DEVICE, HAS_ACCELERATOR, ON_GPU, budget, held_bytes, inputs, layers, memory_limit, run_program
from cuda_cases import marks as pytestmark  # noqa: F401 (marks of all tests here)
from probes import PeakMeter
from torch import nn
from toys import train

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.cuda_accelerator import CudaAccelerator
from patrickstar._hardware.workspaces import THREADS
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import HostArena
from patrickstar.errors import BudgetError

MIB = 1 << 20 if ON_GPU else 1 << 10
flushes = pytest.mark.filterwarnings("ignore:the device had no memory left")
"""Mark of tests in which the allocator meets its limit and frees its cache."""
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _like_a_gpu():
    """Let a simulated accelerator count as a GPU of the Hopper generation does, in sizes of 1/1024."""
    if not HAS_ACCELERATOR:
        pytest.skip("needs an accelerator")
    if not ON_GPU:
        strict = sys.modules["strict_device"]
        strict.configure(small_bytes=MIB, workspace_bytes=32 * MIB)
        yield
        strict.configure()
        return
    yield


def accelerator() -> TorchDevice:
    found = Hardware(DEVICE).accelerator
    assert found is not None
    return found


def wide_layers(count: int = 20) -> nn.Module:
    """Build layers of 8 MiB in 16 bits."""
    return layers(2048 if ON_GPU else 64, count)


def wide_inputs(count: int) -> list[tuple[torch.Tensor]]:
    return inputs(count, width=2048 if ON_GPU else 64, rows=256 if ON_GPU else 8)


@flushes
@pytest.mark.parametrize(("size", "count"), [(128, 20), (900, 48)])
def test_the_allocator_stays_within_the_budget(size, count):
    """Train model data of more than the budget; a budget that is small against pages may be exceeded by some."""
    memory = budget(f"{size * MIB}B")
    gc.collect()
    device = accelerator()
    device.reset_peak()
    meter = PeakMeter(device)
    config = ps.Config(
        device=str(DEVICE), device_memory=memory, host_memory=4096 * MIB, chunk_size=16 * MIB, optimizer=ps.Muon()
    )
    engine = Engine(partial(wide_layers, count), config, meter=meter)
    assert engine.layout.model_data_bytes > size * MIB
    for batch in wide_inputs(4):
        train(engine, [batch])
        meter.note()
        assert meter.allocated <= memory
        limit = device.fragmentation.reserved_limit_bytes(memory)
        assert 0 < engine.stats.last.reserved_bytes <= limit
        assert limit == memory or limit <= memory + 64 * MIB
    engine.close()


def test_a_budget_smaller_than_the_libraries_need_is_refused():
    with pytest.raises(BudgetError, match=r"this device needs \d+ bytes .* more for its libraries"):
        Engine(layers, ps.Config(device=str(DEVICE), device_memory=held_bytes() // 2))


def test_library_workspaces_follow_pytorchs_rule_and_are_allocated_once():
    """In each thread the workspace of cuBLAS, and that of cuBLASLt unless it shares the other."""
    device = accelerator()
    of_one = device.workspace_bytes() if isinstance(device, CudaAccelerator) else 33 * MIB
    hardware = Hardware(DEVICE)
    clear_workspaces()
    held_by_others = device.allocated_bytes
    first = hardware.library_bytes(torch.bfloat16)
    assert first in (THREADS * of_one, THREADS * (of_one - MIB))
    before = settled_bytes(held_by_others + first)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert hardware.library_bytes(dtype) == first
    assert settled_bytes(before) == before
    with_updates = hardware.library_bytes(torch.bfloat16, in_updates=True)
    assert with_updates == first // THREADS * (THREADS + 1)
    clear_workspaces()
    cleared = settled_bytes(held_by_others)
    assert cleared <= before - first
    assert hardware.library_bytes(torch.bfloat16, in_updates=True) == with_updates
    assert settled_bytes(cleared + with_updates) == cleared + with_updates


def settled_bytes(expected: int) -> int:
    """Return the allocated bytes, once they are as expected or for long have not been.

    The thread of backward frees the last gradient after backward has returned.
    """
    until = time.monotonic() + 30
    while accelerator().allocated_bytes != expected and time.monotonic() < until:
        time.sleep(0.001)
    return accelerator().allocated_bytes


def clear_workspaces() -> None:
    if ON_GPU:
        torch._C._cuda_clearCublasWorkspaces()
    else:
        sys.modules["strict_device"].extension.free_workspaces()


def test_the_default_budget_leaves_room():
    free_bytes, _ = torch.accelerator.get_memory_info(DEVICE)
    reserved_bytes = accelerator().allocator_stats().reserved_bytes
    engine = Engine(layers, ps.Config(device=str(DEVICE), host_memory="64MiB"))
    assert free_bytes // 2 <= engine.device_budget_bytes < free_bytes + reserved_bytes
    train(engine, inputs(2))
    engine.close()


def test_the_out_of_memory_error_names_the_use_of_memory():
    width = 1024 if ON_GPU else 32
    held_bytes()
    with memory_limit(64 * MIB):
        config = ps.Config(device=str(DEVICE), device_memory=4096 * MIB, host_memory="64MiB")
        engine = Engine(lambda: nn.Linear(width, width), config)
        with pytest.raises(BudgetError, match=r"ran out of memory.*non-model data"):
            engine(torch.zeros(1 << 14 if ON_GPU else 1 << 9, width, dtype=torch.bfloat16, device=DEVICE))
        engine.close()


@flushes
def test_out_of_memory_for_a_chunk_leaks_nothing():
    """A chunk of 8 MiB meets a limit that leaves less, and the engine goes on when the limit is gone."""
    before = held_bytes()
    config = ps.Config(device=str(DEVICE), device_memory=4096 * MIB, host_memory=4096 * MIB, chunk_size=8 * MIB)
    engine = Engine(wide_layers, config)
    batches = wide_inputs(2)
    with memory_limit(4 * MIB), pytest.raises((BudgetError, torch.OutOfMemoryError)):
        train(engine, batches)
    train(engine, batches)
    engine.close()
    del engine
    assert held_bytes() <= before + MIB


@on_gpu
def test_host_memory_that_cannot_be_locked_is_used_with_a_warning_and_later_calls_succeed():
    """The address range of a locked arena cannot be locked again."""
    device = CudaAccelerator(DEVICE)
    arena = HostArena(1 << 20, device)
    assert arena.page_locked
    with pytest.warns(UserWarning, match=r"can't page-lock 1048576 bytes"):
        assert device.page_lock(arena.memory.data_ptr(), arena.nbytes) is None
    assert torch.ones(3, device=DEVICE).sum().item() == 3
    arena.unlock()
    assert_can_be_locked(device, arena.memory)


@on_gpu
def test_an_arena_that_is_not_closed_can_be_locked_again():
    device = CudaAccelerator(DEVICE)
    arena = HostArena(1 << 20, device)
    assert arena.page_locked
    memory = arena.memory
    del arena
    gc.collect()
    assert_can_be_locked(device, memory)


def assert_can_be_locked(device: CudaAccelerator, memory: torch.Tensor) -> None:
    locked = device.page_lock(memory.data_ptr(), memory.numel())
    assert locked == [memory.data_ptr()]
    device.page_unlock(locked)


EXPANDABLE = """
import torch
from cuda_cases import inputs, layers
from toys import train
import patrickstar as ps
from patrickstar._engine.engine import Engine
torch.manual_seed(0)
engine = Engine(lambda: layers(512, 6), ps.Config(device="cuda", chunk_size="1MiB"))
losses = train(engine, inputs(3, width=512))
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"], [loss.item() for loss in losses])
engine.close()
"""


@on_gpu
def test_segments_are_expandable_unless_the_user_disables_them():
    """The losses are the same."""
    enabled = run_program(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="", PYTORCH_ALLOC_CONF="")
    disabled = run_program(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")
    (on, losses), (off, other_losses) = (text.split(maxsplit=1) for text in (enabled, disabled))
    assert (on, off) == ("True", "False") and losses == other_losses
