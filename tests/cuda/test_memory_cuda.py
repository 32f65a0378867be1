"""Memory of a CUDA device: budgets, library workspaces, and out of memory."""

import gc
from functools import partial

import pytest
import torch
from cuda_cases import DEVICE, budget, held_bytes, inputs, layers, memory_limit, run_program
from cuda_cases import gpu_marks as pytestmark  # noqa: F401 (marks of all tests here)
from torch import nn
from toys import train

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._layout.byte_size import parse_size
from patrickstar._memory.cuda_accelerator import CudaAccelerator
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_arena import HostArena
from patrickstar._memory.memory_meter import DeviceMeter
from patrickstar._memory.workspaces import THREADS, workspace_bytes
from patrickstar.errors import BudgetError

MIB = 1 << 20


class PeakMeter(DeviceMeter):
    """Meter that records the peak over all resets."""

    peak_bytes = 0

    def note(self) -> int:
        """Return the peak of allocated bytes so far."""
        self.peak_bytes = max(self.peak_bytes, self._cuda.peak_allocated_bytes)
        return self.peak_bytes

    def restart(self) -> None:
        self.note()
        super().restart()


def test_the_allocator_stays_within_the_budget():
    """Train model data of many times the budget; the allocator reserves little more than the budget."""
    width, layer_count = 2048, 20
    memory = budget("128MiB")
    gc.collect()
    with memory_limit(parse_size("128MiB") * 3 // 2):
        torch.cuda.reset_peak_memory_stats()
        meter = PeakMeter(DEVICE)
        config = ps.Config(device="cuda", device_memory=memory, chunk_size="16MiB")
        engine = Engine(partial(layers, width, layer_count), config, meter=meter)
        assert engine.layout.model_data_bytes > 8 * parse_size("128MiB")
        for batch in inputs(4, width=width, rows=256):
            train(engine, [batch])
            assert meter.note() <= memory
            assert engine.stats.last.reserved_bytes > 0
        engine.close()


def test_a_budget_smaller_than_the_libraries_need_is_refused():
    with pytest.raises(BudgetError, match=r"this device needs \d+ bytes .* more for its libraries"):
        Engine(layers, ps.Config(device="cuda", device_memory=held_bytes() // 2))


def test_library_workspaces_follow_pytorchs_rule_and_are_allocated_once():
    device = CudaAccelerator(DEVICE)
    first = Hardware(DEVICE).library_bytes(torch.bfloat16)
    assert first == THREADS * workspace_bytes(device)
    before = device.allocated_bytes
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert Hardware(DEVICE).library_bytes(dtype) == first
    assert device.allocated_bytes == before
    torch._C._cuda_clearCublasWorkspaces()
    cleared = device.allocated_bytes
    assert cleared <= before - first
    assert Hardware(DEVICE).library_bytes(torch.bfloat16) == first
    assert device.allocated_bytes == cleared + first


def test_the_default_budget_leaves_room():
    engine = Engine(layers, ps.Config(device="cuda"))
    free, total = torch.cuda.mem_get_info(DEVICE)
    assert total // 2 < engine.device_budget_bytes < free + torch.cuda.memory_reserved(DEVICE)
    train(engine, inputs(2))
    engine.close()


def test_the_out_of_memory_error_names_the_use_of_memory():
    width = 1024
    held_bytes()
    with memory_limit(64 * MIB):
        engine = Engine(lambda: nn.Linear(width, width), ps.Config(device="cuda", device_memory="4GiB"))
        with pytest.raises(BudgetError, match=r"ran out of memory.*non-model data"):
            engine(torch.zeros(1 << 14, width, dtype=torch.bfloat16, device="cuda"))
        engine.close()


def test_out_of_memory_for_a_chunk_leaks_nothing():
    before = held_bytes()
    config = ps.Config(device="cuda", device_memory="4GiB", chunk_size="8MiB")
    with memory_limit(24 * MIB), pytest.raises((BudgetError, torch.OutOfMemoryError)):
        Engine(partial(layers, 2048, 8), config)
    assert held_bytes() <= before + MIB
    engine = Engine(partial(layers, 2048, 8), config)
    train(engine, inputs(2, width=2048))
    engine.close()


def test_host_memory_that_cannot_be_locked_is_used_with_a_warning_and_later_calls_succeed():
    """The address range of a locked arena cannot be locked again."""
    device = CudaAccelerator(DEVICE)
    arena = HostArena(1 << 20, device)
    assert arena.page_locked
    with pytest.warns(UserWarning, match=r"can't page-lock 1048576 bytes"):
        assert device.page_lock(arena.memory.data_ptr(), arena.nbytes) is None
    assert torch.ones(3, device=DEVICE).sum().item() == 3
    arena.close()
    assert_can_be_locked(device, arena.memory)


def test_an_arena_that_is_not_closed_can_be_locked_again():
    device = CudaAccelerator(DEVICE)
    arena = HostArena(1 << 20, device)
    assert arena.page_locked
    memory = arena.memory
    del arena
    gc.collect()
    assert_can_be_locked(device, memory)


def assert_can_be_locked(device: CudaAccelerator, memory: torch.Tensor) -> None:
    """Assert that host memory is not locked: it can be, once."""
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


def test_segments_are_expandable_unless_the_user_disables_them():
    """The losses are the same."""
    outputs = [
        run_program(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="", PYTORCH_ALLOC_CONF=""),
        run_program(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"),
    ]
    (on, losses), (off, other_losses) = (text.split(maxsplit=1) for text in outputs)
    assert (on, off) == ("True", "False") and losses == other_losses
