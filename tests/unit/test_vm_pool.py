"""Pages that move between ranges of addresses: whose they are, how many there are, and what the system says of them."""

import ctypes
import gc
import mmap
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from patrickstar._memory.vm_pool import HUGE_PAGE, SYSTEM_PAGE, PagePool, VMRange, can_move_pages, round_up
from patrickstar.errors import BudgetError

pytestmark = pytest.mark.skipif(not can_move_pages(), reason="this system moves no pages")

PAGEMAP, MAPS = Path("/proc/self/pagemap"), Path("/proc/self/maps")


def tensor_over(memory: VMRange) -> torch.Tensor:
    """All bytes of a range, as a chunk sees them."""
    return torch.empty(0, dtype=torch.uint8).set_(memory.storage())


def resident_bytes(memory: VMRange) -> int:
    """Bytes of pages that the system really has behind a range, swapped ones included, page by page."""
    if not PAGEMAP.exists():
        pytest.skip("this system does not say which pages are resident")
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(memory.address // SYSTEM_PAGE * 8)
        entries = file.read(memory.nbytes // SYSTEM_PAGE * 8)
    there = sum(int.from_bytes(entries[at : at + 8], "little") >> 62 != 0 for at in range(0, len(entries), 8))
    return there * SYSTEM_PAGE


def permissions(address: int, nbytes: int) -> set[str]:
    """What may be done at these addresses; 'unmapped' where nothing is."""
    found, at, end = set(), address, address + nbytes
    for line in MAPS.read_text().splitlines():
        span, allowed, *_ = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        if high > at and low < end:
            found |= {allowed[:2]} | ({"unmapped"} if low > at else set())
            at = high
    return found | ({"unmapped"} if at < end else set())


def committed(bank: PagePool, nbytes: int, fill: int = 1) -> VMRange:
    memory = VMRange(nbytes)
    bank.commit(memory)
    tensor_over(memory).fill_(fill)
    return memory


# One range


@pytest.mark.parametrize("nbytes", [1, SYSTEM_PAGE - 1, SYSTEM_PAGE, SYSTEM_PAGE + 1, HUGE_PAGE + 7, 3 * HUGE_PAGE])
def test_a_range_has_all_its_bytes_at_one_address_for_life(nbytes):
    bank, memory = PagePool(), VMRange(nbytes)
    storage = memory.storage()
    address = storage.data_ptr()
    assert address == memory.address and address % HUGE_PAGE == 0
    assert storage.nbytes() == nbytes, "a storage keeps its size, whatever lies behind it"
    assert permissions(address, memory.nbytes) == {"--"}
    for fill in (1, 2, 3):
        bank.commit(memory)
        assert permissions(address, memory.nbytes) == {"rw"}
        tensor = tensor_over(memory).fill_(fill)
        assert (tensor == fill).all()
        bank.decommit(memory)
        assert permissions(address, memory.nbytes) == {"--"}
        if fill == 2:
            bank.trim(0)
        assert (storage.data_ptr(), storage.nbytes(), memory.storage().data_ptr()) == (address, nbytes, address)
    bank.release(memory)
    assert (bank.mapped_bytes, bank.parked_bytes) == (0, 0)
    assert permissions(address, memory.nbytes) == {"--"}


def test_bytes_beside_a_range_belong_to_no_other():
    bank = PagePool()
    ranges = [committed(bank, 5 * SYSTEM_PAGE + 1, fill) for fill in range(8)]
    spans = sorted((memory.address, memory.address + memory.nbytes) for memory in ranges)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all((tensor_over(memory) == fill).all() for fill, memory in enumerate(ranges))


def test_who_comes_back_before_others_took_its_pages_has_them_still():
    """Nobody may rely on the content, but nothing is zeroed or mapped anew for it."""
    bank = PagePool()
    memory = committed(bank, 10 * SYSTEM_PAGE, 7)
    bank.decommit(memory)
    bank.commit(memory)
    assert (tensor_over(memory) == 7).all()
    assert (bank.mapped_bytes, bank.parked_bytes) == (10 * SYSTEM_PAGE, 0)


# Pages that move


def test_parked_pages_are_taken_by_others_and_none_are_mapped_for_it():
    bank = PagePool()
    first, second = committed(bank, 8 * SYSTEM_PAGE, 1), VMRange(8 * SYSTEM_PAGE)
    bank.decommit(first)
    assert resident_bytes(first) == 8 * SYSTEM_PAGE, "parked pages stay"
    bank.commit(second)
    assert (bank.mapped_bytes, bank.parked_bytes) == (8 * SYSTEM_PAGE, 0)
    assert (resident_bytes(first), resident_bytes(second)) == (0, 8 * SYSTEM_PAGE), "they were not moved"
    assert (tensor_over(second) == 1).all(), "pages carry what was in them: that is why a manager poisons"
    assert permissions(first.address, first.nbytes) == {"--"}, "addresses without pages stay reserved"


def test_as_many_pages_move_as_are_wanted_and_the_rest_stay():
    bank = PagePool()
    large, small = committed(bank, 8 * SYSTEM_PAGE), VMRange(3 * SYSTEM_PAGE)
    bank.decommit(large)
    bank.commit(small)
    tensor_over(small).fill_(2)
    assert (bank.mapped_bytes, bank.parked_bytes) == (8 * SYSTEM_PAGE, 5 * SYSTEM_PAGE)
    assert (resident_bytes(large), resident_bytes(small)) == (5 * SYSTEM_PAGE, 3 * SYSTEM_PAGE)
    bank.commit(large)
    tensor_over(large).fill_(3)
    assert (bank.mapped_bytes, bank.parked_bytes) == (11 * SYSTEM_PAGE, 0)
    assert (tensor_over(small) == 2).all() and (tensor_over(large) == 3).all()


def test_pages_of_several_ranges_make_up_a_larger_one():
    bank = PagePool()
    for nbytes in (2 * SYSTEM_PAGE, 5 * SYSTEM_PAGE, 3 * SYSTEM_PAGE):
        bank.decommit(committed(bank, nbytes))
    large = committed(bank, 12 * SYSTEM_PAGE, 9)
    assert (bank.mapped_bytes, bank.parked_bytes) == (12 * SYSTEM_PAGE, 0), "10 parked and 2 new"
    bank.decommit(large)
    parts = [
        committed(bank, nbytes, fill) for fill, nbytes in enumerate((5 * SYSTEM_PAGE, SYSTEM_PAGE, 6 * SYSTEM_PAGE))
    ]
    assert (bank.mapped_bytes, bank.parked_bytes) == (12 * SYSTEM_PAGE, 0), "cut up again, across its pieces"
    assert all((tensor_over(part) == fill).all() for fill, part in enumerate(parts))


def test_pages_come_from_who_has_as_many_before_larger_ones_are_cut():
    bank = PagePool()
    large, equal = committed(bank, 9 * SYSTEM_PAGE, 1), committed(bank, 4 * SYSTEM_PAGE, 2)
    bank.decommit(large)
    bank.decommit(equal)
    bank.commit(VMRange(4 * SYSTEM_PAGE))
    assert (resident_bytes(large), resident_bytes(equal)) == (9 * SYSTEM_PAGE, 0)


def test_huge_pages_are_cut_and_put_together_without_a_byte_going_astray():
    bank = PagePool()
    sizes = [4 * HUGE_PAGE, HUGE_PAGE + 3 * SYSTEM_PAGE, HUGE_PAGE - SYSTEM_PAGE, 5 * HUGE_PAGE + 1, SYSTEM_PAGE]
    ranges = [VMRange(nbytes) for nbytes in sizes]
    for turn in range(3):
        for fill, memory in enumerate(ranges):
            bank.commit(memory)
            tensor_over(memory).fill_(10 * turn + fill)
            if fill % 2 == turn % 2:
                bank.decommit(memory)
        for fill, memory in enumerate(ranges):
            if fill % 2 != turn % 2:
                assert (tensor_over(memory) == 10 * turn + fill).all()
                bank.decommit(memory)
    assert bank.mapped_bytes == bank.parked_bytes <= sum(round_up(nbytes) for nbytes in sizes)
    bank.trim(0)
    assert not any(resident_bytes(memory) for memory in ranges)


# Giving back


@pytest.mark.parametrize(
    ("keep_pages", "more_bytes", "kept_pages"),
    [(1000, 0, 6), (6, 0, 6), (6, -1, 5), (3, 0, 3), (1, -1, 0), (0, 0, 0), (-5, 0, 0)],
)
def test_trimmed_pages_are_not_resident_and_as_many_are_kept_as_may_be(keep_pages, more_bytes, kept_pages):
    bank = PagePool()
    used, *parked = (committed(bank, nbytes * SYSTEM_PAGE) for nbytes in (2, 4, 2))
    for memory in parked:
        bank.decommit(memory)
    bank.trim(keep_pages * SYSTEM_PAGE + more_bytes)
    assert (bank.mapped_bytes, bank.parked_bytes) == ((2 + kept_pages) * SYSTEM_PAGE, kept_pages * SYSTEM_PAGE)
    assert sum(resident_bytes(memory) for memory in parked) == kept_pages * SYSTEM_PAGE
    assert resident_bytes(used) == 2 * SYSTEM_PAGE and (tensor_over(used) == 1).all(), "it is in use"
    for memory in parked:
        assert permissions(memory.address, memory.nbytes) == {"--"}
        bank.commit(memory)
        assert permissions(memory.address, memory.nbytes) == {"rw"}
        tensor_over(memory).fill_(1)
    assert (bank.mapped_bytes, bank.parked_bytes) == (8 * SYSTEM_PAGE, 0)


def test_what_was_trimmed_comes_back_as_zeros():
    bank = PagePool()
    memory = committed(bank, 4 * SYSTEM_PAGE, 5)
    bank.decommit(memory)
    bank.trim(0)
    bank.commit(memory)
    assert (tensor_over(memory) == 0).all()


@pytest.mark.parametrize("state", ["in use", "parked", "partly taken", "trimmed", "never there"])
def test_a_forgotten_range_takes_no_memory_and_leaves_others_theirs(state):
    bank = PagePool()
    memory, other = VMRange(6 * SYSTEM_PAGE), committed(bank, SYSTEM_PAGE, 4)
    if state != "never there":
        bank.commit(memory)
        tensor_over(memory).fill_(1)
    if state not in ("in use", "never there"):
        bank.decommit(memory)
    taker = committed(bank, 2 * SYSTEM_PAGE, 8) if state == "partly taken" else None
    if state == "trimmed":
        bank.trim(SYSTEM_PAGE)
    bank.release(memory)
    kept = SYSTEM_PAGE * (1 if taker is None else 3)
    assert (bank.mapped_bytes, bank.parked_bytes) == (kept, 0)
    assert resident_bytes(memory) == 0
    assert (tensor_over(other) == 4).all()
    assert taker is None or (tensor_over(taker) == 8).all()


def test_a_tensor_that_outlives_its_range_keeps_the_addresses_from_everybody_else():
    bank = PagePool()
    memory = committed(bank, 64 * SYSTEM_PAGE)
    kept = tensor_over(memory)
    address, nbytes = memory.address, memory.nbytes
    bank.release(memory)
    del memory
    gc.collect()
    others = [mmap.mmap(-1, nbytes) for _ in range(20)]
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(other)) for other in others]
    assert not any(start < address + nbytes and address < start + nbytes for start in starts)
    assert permissions(address, nbytes) == {"--"}
    assert (kept.data_ptr(), kept.numel()) == (address, nbytes)
    view = kept[5:].view(-1, 1)
    del kept
    gc.collect()
    assert permissions(address, nbytes) == {"--"}, "a view of it is there"
    del view
    gc.collect()
    assert permissions(address, nbytes) == {"unmapped"}


def test_a_range_that_nobody_forgot_is_given_back_with_the_last_tensor_over_it():
    bank = PagePool()
    memory = committed(bank, 8 * SYSTEM_PAGE, 3)
    kept, address, nbytes = tensor_over(memory), memory.address, memory.nbytes
    del memory
    gc.collect()
    assert (kept == 3).all()
    del kept
    gc.collect()
    assert permissions(address, nbytes) == {"unmapped"}


def test_what_the_system_can_not_give_is_an_error_in_bytes():
    with pytest.raises(BudgetError, match=r"refused to map \d+ bytes of memory: .+; give a smaller device_memory"):
        VMRange(1 << 60)


# Whoever reads what is not there


@pytest.mark.parametrize(
    "gone", ["bank.decommit(memory)", "bank.decommit(memory); bank.trim(0)", "bank.release(memory)"]
)
@pytest.mark.parametrize("use", ["tensor.sum()", "tensor[-1:].fill_(1)"])
def test_reading_and_writing_a_range_without_pages_is_stopped_by_the_system(gone, use):
    program = (
        "import faulthandler, resource, torch\n"
        "from patrickstar._memory.vm_pool import PagePool, VMRange\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "bank, memory = PagePool(), VMRange(20000)\n"
        "tensor = torch.empty(0, dtype=torch.uint8).set_(memory.storage())\n"
        f"bank.commit(memory); {use}; print('was there', flush=True)\n"
        f"{gone}; {use}; print('came through')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "was there\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


# Random sequences


class Operations(RuleBasedStateMachine):
    """Ranges in use are filled with a number of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = PagePool()
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
        parked, mapped = self.bank.parked_bytes, self.bank.mapped_bytes
        self.bank.commit(memory)
        assert self.bank.mapped_bytes == mapped + max(0, memory.nbytes - parked), "parked pages come first"
        assert self.bank.parked_bytes == max(0, parked - memory.nbytes)
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
        before = self.bank.mapped_bytes
        self.bank.decommit(memory)
        assert self.bank.mapped_bytes == before

    @rule(keep_bytes=st.integers(-10, 30 * SYSTEM_PAGE))
    def trim(self, keep_bytes: int) -> None:
        before = self.bank.parked_bytes
        self.bank.trim(keep_bytes)
        assert self.bank.parked_bytes == min(before, max(0, keep_bytes) // SYSTEM_PAGE * SYSTEM_PAGE)

    @precondition(lambda self: self.fill or self.away)
    @rule(data=st.data())
    def forget(self, data) -> None:
        memory = self.draw(data, {*self.fill, *self.away})
        self.fill.pop(memory, None)
        self.away.discard(memory)
        self.bank.release(memory)
        assert not memory.runs and resident_bytes(memory) == 0

    @invariant()
    def bytes_are_counted_as_the_system_counts_them_and_content_is_where_it_was_put(self) -> None:
        bank = self.bank
        used, away = sum(memory.nbytes for memory in self.fill), [resident_bytes(memory) for memory in self.away]
        assert bank.mapped_bytes - bank.parked_bytes == used == sum(resident_bytes(memory) for memory in self.fill)
        assert bank.parked_bytes == sum(away)
        for memory, fill in self.fill.items():
            tensor = tensor_over(memory)
            assert tensor.data_ptr() == self.address[memory]
            assert (tensor == fill).all()


TestOperations = Operations.TestCase
TestOperations.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=40)
