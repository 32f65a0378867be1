"""Memory of a CUDA device: budgets, workspaces of libraries, and what happens when there is none left."""

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
from patrickstar._memory.cuda_device import CudaDevice
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_arena import HostArena
from patrickstar._memory.memory_meter import CudaMeter
from patrickstar._memory.workspaces import THREADS, workspace_bytes
from patrickstar.errors import BudgetError

MIB = 1 << 20


class PeakMeter(CudaMeter):
    """Remembers the peak over all resets."""

    most_bytes = 0

    def note(self) -> int:
        """The most bytes that were allocated so far."""
        self.most_bytes = max(self.most_bytes, self._cuda.peak_allocated_bytes)
        return self.most_bytes

    def restart(self) -> None:
        self.note()
        super().restart()


def test_the_allocator_stays_within_the_budget():
    """Model data is many times the budget, in watched and in planned steps; what the allocator holds is little more."""
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


def test_libraries_keep_what_pytorchs_rule_says_and_no_more_the_second_time():
    device = CudaDevice(DEVICE)
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


def test_out_of_memory_says_what_took_the_bytes():
    width = 1024
    held_bytes()
    with memory_limit(64 * MIB):
        engine = Engine(lambda: nn.Linear(width, width), ps.Config(device="cuda", device_memory="4GiB"))
        with pytest.raises(BudgetError, match=r"ran out of memory.*non-model data"):
            engine(torch.zeros(1 << 14, width, dtype=torch.bfloat16, device="cuda"))
        engine.close()


def test_out_of_memory_for_a_chunk_leaves_nothing_behind():
    before = held_bytes()
    config = ps.Config(device="cuda", device_memory="4GiB", chunk_size="8MiB")
    with memory_limit(24 * MIB), pytest.raises((BudgetError, torch.OutOfMemoryError)):
        Engine(partial(layers, 2048, 8), config)
    assert held_bytes() <= before + MIB
    engine = Engine(partial(layers, 2048, 8), config)
    train(engine, inputs(2, width=2048))
    engine.close()


def test_host_memory_that_cannot_be_locked_is_a_budget_error_and_poisons_nothing():
    """The address range of a slab that is locked already can't be locked again."""
    device = CudaDevice(DEVICE)
    slab = HostArena(1 << 20, device)
    with pytest.raises(BudgetError, match=r"can't page-lock 1048576 bytes"):
        device.lock(slab.memory.data_ptr(), slab.nbytes)
    assert torch.ones(3, device=DEVICE).sum().item() == 3
    slab.close()
    again = device.lock(slab.memory.data_ptr(), slab.nbytes)
    device.unlock(again)


def test_a_slab_that_nobody_closes_can_be_locked_again():
    device = CudaDevice(DEVICE)
    slab = HostArena(1 << 20, device)
    memory = slab.memory
    del slab
    gc.collect()
    device.unlock(device.lock(memory.data_ptr(), memory.numel()))


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


def test_segments_are_expandable_unless_the_user_says_otherwise():
    """With the same losses."""
    found = [
        run_program(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="", PYTORCH_ALLOC_CONF=""),
        run_program(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"),
    ]
    (on, its_losses), (off, other_losses) = (text.split(maxsplit=1) for text in found)
    assert (on, off) == ("True", "False") and its_losses == other_losses
