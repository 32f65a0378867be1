"""Test the virtual memory pool: page ownership, accounts, and the system's view of them."""

import ctypes
import gc
import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from resident_pages import resident_bytes_at
from sampling import draws

from patrickstar._hardware import vm_pool as module
from patrickstar._hardware.vm_pool import HUGE_PAGE, SYSTEM_PAGE, PagePool, VMRange, can_move_pages, round_up
from patrickstar.errors import BudgetError

pytestmark = pytest.mark.skipif(not can_move_pages(), reason="this system cannot move pages")

MAPS = Path("/proc/self/maps")


def tensor_over(memory: VMRange) -> torch.Tensor:
    """Return all bytes of a range as a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(memory.storage())


def resident_bytes(memory: VMRange) -> int:
    """Return the bytes of pages that the system has for a range, including swapped ones."""
    return resident_bytes_at(memory.address, memory.nbytes)


def permissions(address: int, nbytes: int) -> set[str]:
    """Return the permissions at these addresses; 'unmapped' where there is no mapping."""
    found, at, end = set(), address, address + nbytes
    for line in MAPS.read_text().splitlines():
        span, allowed, *_ = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        if high > at and low < end:
            found |= {allowed[:2]} | ({"unmapped"} if low > at else set())
            at = high
    return found | ({"unmapped"} if at < end else set())


def committed(pool: PagePool, nbytes: int, fill: int = 1) -> VMRange:
    memory = VMRange(nbytes)
    pool.commit(memory)
    tensor_over(memory).fill_(fill)
    return memory


@pytest.mark.parametrize("nbytes", [1, SYSTEM_PAGE - 1, SYSTEM_PAGE, SYSTEM_PAGE + 1, HUGE_PAGE + 7, 3 * HUGE_PAGE])
def test_range_keeps_its_address_and_size(nbytes):
    pool, memory = PagePool(), VMRange(nbytes)
    storage = memory.storage()
    address = storage.data_ptr()
    assert address == memory.address and address % HUGE_PAGE == 0
    assert storage.nbytes() == nbytes, "a storage keeps its size with or without pages"
    assert permissions(address, memory.nbytes) == {"--"}
    for fill in (1, 2, 3):
        pool.commit(memory)
        assert permissions(address, memory.nbytes) == {"rw"}
        tensor = tensor_over(memory).fill_(fill)
        assert (tensor == fill).all()
        pool.decommit(memory)
        assert permissions(address, memory.nbytes) == {"--"}
        if fill == 2:
            pool.trim(0)
        assert (storage.data_ptr(), storage.nbytes(), memory.storage().data_ptr()) == (address, nbytes, address)
    pool.release(memory)
    assert (pool.mapped_bytes, pool.parked_bytes) == (0, 0)
    assert permissions(address, memory.nbytes) == {"--"}


@pytest.mark.parametrize("trimmed", [False, True])
def test_range_gets_its_own_parked_pages_back_and_trimmed_ones_as_zeros(trimmed):
    """The content is undefined, but no page is zeroed or mapped again that is still there."""
    pool = PagePool()
    memory = committed(pool, 10 * SYSTEM_PAGE, 7)
    pool.decommit(memory)
    if trimmed:
        pool.trim(0)
    pool.commit(memory)
    assert (tensor_over(memory) == (0 if trimmed else 7)).all()
    assert (pool.mapped_bytes, pool.parked_bytes) == (10 * SYSTEM_PAGE, 0)


def test_range_of_equal_size_is_preferred_as_source():
    pool = PagePool()
    large, equal = committed(pool, 9 * SYSTEM_PAGE, 1), committed(pool, 4 * SYSTEM_PAGE, 2)
    pool.decommit(large)
    pool.decommit(equal)
    pool.commit(VMRange(4 * SYSTEM_PAGE))
    assert (resident_bytes(large), resident_bytes(equal)) == (9 * SYSTEM_PAGE, 0)


def test_huge_pages_are_split_and_joined_correctly():
    pool = PagePool()
    sizes = [4 * HUGE_PAGE, HUGE_PAGE + 3 * SYSTEM_PAGE, HUGE_PAGE - SYSTEM_PAGE, 5 * HUGE_PAGE + 1, SYSTEM_PAGE]
    ranges = [VMRange(nbytes) for nbytes in sizes]
    for turn in range(3):
        for fill, memory in enumerate(ranges):
            pool.commit(memory)
            tensor_over(memory).fill_(10 * turn + fill)
            if fill % 2 == turn % 2:
                pool.decommit(memory)
        for fill, memory in enumerate(ranges):
            if fill % 2 != turn % 2:
                assert (tensor_over(memory) == 10 * turn + fill).all()
                pool.decommit(memory)
    assert pool.mapped_bytes == pool.parked_bytes <= sum(round_up(nbytes) for nbytes in sizes)
    pool.trim(0)
    assert not any(resident_bytes(memory) for memory in ranges)


@pytest.mark.parametrize("released", [True, False])
def test_tensor_keeps_the_addresses_of_its_range_reserved(released):
    pool = PagePool()
    memory = committed(pool, 64 * SYSTEM_PAGE, 3)
    tensor = tensor_over(memory)
    address, nbytes = memory.address, memory.nbytes
    if released:
        pool.release(memory)
    del memory
    gc.collect()
    others = [mmap.mmap(-1, nbytes) for _ in range(20)]
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(other)) for other in others]
    assert not any(start < address + nbytes and address < start + nbytes for start in starts)
    assert permissions(address, nbytes) == ({"--"} if released else {"rw"})
    assert (tensor.data_ptr(), tensor.numel()) == (address, nbytes)
    view = tensor[5:].view(-1, 1)
    del tensor
    gc.collect()
    assert permissions(address, nbytes) == ({"--"} if released else {"rw"}), "a view of it is there"
    assert released or (view == 3).all()
    del view
    gc.collect()
    assert permissions(address, nbytes) == {"unmapped"}


def test_refused_mapping_is_a_budget_error():
    with pytest.raises(BudgetError, match=r"refused to map \d+ bytes of memory: .+; give a smaller device_memory"):
        VMRange(1 << 60)


def test_access_to_a_range_without_pages_is_a_segmentation_fault():
    removals = ["pool.decommit(memory)", "pool.decommit(memory); pool.trim(0)", "pool.release(memory)"]
    accesses = ["tensor.sum()", "tensor[-1:].fill_(1)"]
    # One interpreter forks a child for each case: importing torch takes most of the time.
    program = f"""
import os, resource, signal, torch
from patrickstar._hardware.vm_pool import PagePool, VMRange

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for removal in {removals!r}:
    for access in {accesses!r}:
        child = os.fork()
        if child == 0:
            pool, memory = PagePool(), VMRange(20000)
            tensor = torch.empty(0, dtype=torch.uint8).set_(memory.storage())
            pool.commit(memory)
            exec(access)
            signal.alarm(60)
            exec(removal)
            exec(access)
            os._exit(0)
        print(removal, access, os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    expected = [f"{removal} {access} {int(signal.SIGSEGV)}" for removal in removals for access in accesses]
    assert done.stdout.splitlines() == expected, done.stderr


class Operations(RuleBasedStateMachine):
    """State machine; each range in use is filled with a unique number."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool()
        self.fill: dict[VMRange, int] = {}  # those in use
        self.away: set[VMRange] = set()
        self.address: dict[VMRange, int] = {}
        self.turns = 0

    def draw(self, data, ranges) -> VMRange:
        return data.draw(st.sampled_from([memory for memory in self.address if memory in ranges]))

    @rule(nbytes=st.integers(1, 12 * SYSTEM_PAGE))
    def new(self, nbytes: int) -> None:
        memory = VMRange(nbytes)
        self.away.add(memory)
        self.address[memory] = memory.storage().data_ptr()

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def commit(self, data) -> None:
        memory = self.draw(data, self.away)
        parked, mapped = self.pool.parked_bytes, self.pool.mapped_bytes
        self.pool.commit(memory)
        assert self.pool.mapped_bytes == mapped + max(0, memory.nbytes - parked), "parked pages come first"
        assert self.pool.parked_bytes == max(0, parked - memory.nbytes)
        self.away.remove(memory)
        self.turns += 1
        self.fill[memory] = self.turns % 251
        tensor_over(memory).fill_(self.fill[memory])

    @precondition(lambda self: self.fill)
    @rule(data=st.data())
    def park(self, data) -> None:
        memory = self.draw(data, self.fill)
        del self.fill[memory]
        self.away.add(memory)
        before = self.pool.mapped_bytes
        self.pool.decommit(memory)
        assert self.pool.mapped_bytes == before

    @rule(keep_bytes=st.integers(-10, 30 * SYSTEM_PAGE))
    def trim(self, keep_bytes: int) -> None:
        before = self.pool.parked_bytes
        self.pool.trim(keep_bytes)
        assert self.pool.parked_bytes == min(before, max(0, keep_bytes) // SYSTEM_PAGE * SYSTEM_PAGE)

    @precondition(lambda self: self.fill or self.away)
    @rule(data=st.data())
    def release(self, data) -> None:
        memory = self.draw(data, {*self.fill, *self.away})
        self.fill.pop(memory, None)
        self.away.discard(memory)
        self.pool.release(memory)
        assert not memory.runs and resident_bytes(memory) == 0

    @invariant()
    def accounts_match_the_system_and_content_is_intact(self) -> None:
        pool = self.pool
        used, away = sum(memory.nbytes for memory in self.fill), [resident_bytes(memory) for memory in self.away]
        assert pool.mapped_bytes - pool.parked_bytes == used == sum(resident_bytes(memory) for memory in self.fill)
        assert pool.parked_bytes == sum(away)
        for memory, fill in self.fill.items():
            tensor = tensor_over(memory)
            assert tensor.data_ptr() == self.address[memory]
            assert (tensor == fill).all()


TestOperations = Operations.TestCase
TestOperations.settings = settings(derandomize=True, deadline=None, max_examples=draws(60), stateful_step_count=40)


def test_pages_are_faulted_in_and_keep_their_content():
    nbytes = 9 * SYSTEM_PAGE + 1
    memory = torch.frombuffer(module.private_memory(nbytes), dtype=torch.uint8)
    memory[3 * SYSTEM_PAGE : 3 * SYSTEM_PAGE + 2] = 7
    assert resident_bytes_at(memory.data_ptr(), nbytes) == SYSTEM_PAGE
    module.fault_in(memory.data_ptr(), nbytes)
    assert resident_bytes_at(memory.data_ptr(), nbytes) == 10 * SYSTEM_PAGE
    assert memory.sum() == 14 and memory[3 * SYSTEM_PAGE] == 7
