"""The chunk manager against a simple model: bytes are never lost, and accounts are the real bytes."""

import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.errors import BudgetError
from patrickstar.layout.lists import EXP_AVG, PARAM16, PARAM32
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.manager import Manager
from patrickstar.schedule.eviction import NextUse
from patrickstar.schedule.trace import Moment, Trace

CPU = torch.device("cpu")
KINDS = ((PARAM16, "bfloat16"), (PARAM32, "float32"), (EXP_AVG, "float32"))


class Model:
    """What each chunk must hold, beside a manager that moves it about."""

    def __init__(self, device_bytes: int, host_bytes: int, evict_everything: bool) -> None:
        self.manager = Manager(CPU, device_bytes, host_bytes, poison=True)
        self.manager.evict_everything = evict_everything
        self.value: dict[Chunk, int] = {}
        self.writes = 0

    def write(self, chunk: Chunk) -> None:
        """Give a chunk new content where it lies."""
        self.writes += 1
        self.value[chunk] = self.writes
        chunk.current(chunk.whole).fill_(self.writes)
        self.manager.mark_written(chunk, on_device=chunk.device_valid)

    def check(self) -> None:
        """Nothing is lost or mixed up; accounts are the real bytes, and within the budgets."""
        manager = self.manager
        for chunk, value in self.value.items():
            assert chunk.device_valid or chunk.host_valid
            if chunk.device_valid:
                assert chunk.on_device(chunk.whole).eq(value).all()
            if chunk.host_valid:
                assert chunk.on_host(chunk.whole).eq(value).all()
            assert chunk.device_valid or not chunk.pins
        assert manager.device_used == sum(chunk.storage.nbytes() for chunk in self.value)
        assert manager.host_used == sum(0 if chunk.host is None else chunk.host.nbytes for chunk in self.value)
        assert manager.device_used <= manager.device_budget_bytes
        assert manager.host_used + manager.host_non_model_bytes <= manager.host_budget_bytes


operations = st.lists(
    st.tuples(st.sampled_from(["create", "bring", "room", "down", "up", "write", "pin", "reserve", "remove"]),
              st.integers(0, 5), st.integers(0, 5)),
    max_size=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None, print_blob=True)
@given(operations, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_any_order_of_operations(steps, device_units, host_units, evict_everything):
    """Chunks of one to three units of 64 bytes; what the budgets refuse leaves everything as it was."""
    model = Model(64 * device_units, 64 * host_units, evict_everything)
    manager = model.manager
    for name, first, second in steps:
        chunks = list(model.value)
        chosen = list(dict.fromkeys(chunks[i % len(chunks)] for i in (first, second))) if chunks else []
        clean = {chunk for chunk in chunks if chunk.host_valid}
        before = {chunk: chunk.moved_bytes for chunk in chunks}
        down = manager.traffic.d2h_bytes
        try:
            if name == "create":
                kind, dtype = KINDS[first % len(KINDS)]
                chunk = Chunk(kind, len(model.value) + model.writes * 100, 32 * (1 + second % 3), dtype, CPU)
                manager.create(chunk, on_device=bool(second % 2))
                model.value[chunk] = 0
                model.write(chunk)
            elif name == "bring":
                manager.bring(chosen)
                assert all(chunk.device_valid for chunk in chosen)
            elif name == "room":
                manager.make_room(64 * first, protect=chosen)
                assert manager.device_used + 64 * first <= manager.chunkable_bytes
            elif name in ("up", "down"):
                for chunk in chosen:
                    if not chunk.pins:
                        manager.settle(chunk, on_device=name == "up")
                        assert (chunk.device_valid, chunk.host is None) == (name == "up", name == "up")
            elif name == "write":
                for chunk in chosen:
                    model.write(chunk)
            elif name == "pin":
                for chunk in chosen:
                    chunk.pins = (chunk.pins + 1) % 2 if chunk.device_valid else 0
            elif name == "reserve":
                manager.reserve_host(64 if second % 2 else -manager.host_non_model_bytes)
            elif chosen and not chosen[0].pins:
                manager.remove(chosen[0])
                del model.value[chosen[0]]
        except BudgetError as error:
            assert error.short_bytes is not None and error.short_bytes > 0
            assert f"{error.short_bytes} bytes" in str(error)
        model.check()
        written_back = {c for c in clean & model.value.keys() if not c.device_valid and c.moved_bytes > before[c]}
        assert not written_back or manager.traffic.d2h_bytes == down, "a chunk that was not written was written back"


def named_figure(error: BudgetError, tier: str) -> int:
    """By how many bytes an error asks to raise a budget."""
    found = re.search(rf"[Rr]aise [\w ]*{tier}_memory by at least (\d+) bytes", str(error))
    assert found is not None, str(error)
    return int(found[1])


def manager_of(count: int, device_bytes: int, host_bytes: int, *, on_device: bool) -> tuple[Manager, list[Chunk]]:
    """A manager with `param16` chunks of 64 bytes each."""
    manager = Manager(CPU, device_bytes, host_bytes, poison=True)
    return manager, [manager.create(Chunk(PARAM16, i, 32, "bfloat16", CPU), on_device) for i in range(count)]


@pytest.mark.parametrize("more_bytes", [0, -1])
@pytest.mark.parametrize("tier", ["device", "host", "activations"])
def test_what_a_refusal_asks_for_is_enough_and_one_byte_less_is_not(tier, more_bytes):
    on_device = tier != "device"
    manager, chunks = manager_of(4, 1000, 1000, on_device=on_device)
    budget = "host_budget_bytes" if on_device else "device_budget_bytes"
    setattr(manager, budget, 150)
    manager.non_model_bytes, manager.host_non_model_bytes = 40, 100
    refused = {
        "device": lambda: manager.bring(chunks[:3]),
        "host": lambda: manager.settle(chunks[0], on_device=False),
        "activations": lambda: manager.reserve_host(64),
    }[tier]
    with pytest.raises(BudgetError) as caught:
        refused()
    named = named_figure(caught.value, "host" if on_device else "device")
    setattr(manager, budget, 150 + named + more_bytes)
    with pytest.raises(BudgetError) if more_bytes else nullcontext():
        refused()


def test_the_policy_is_asked_at_the_moment_that_is_now():
    manager, chunks = manager_of(4, 3 * 64, 10 * 64, on_device=False)
    manager.policy = NextUse(Trace([Moment((index,)) for index in (0, 1, 2, 1, 3, 0, 2, 1)]))
    manager.bring(chunks[:3])
    manager.now = 4
    manager.bring(chunks[3:])
    assert [chunk.device_valid for chunk in chunks] == [True, False, True, True]


def test_a_chunk_that_was_not_written_is_not_written_back():
    manager, (first, second) = manager_of(2, 64, 3 * 64, on_device=False)
    for chunk in (first, second, first):
        manager.bring([chunk])
    assert (manager.traffic.h2d_bytes, manager.traffic.d2h_bytes, manager.traffic.evictions) == (3 * 64, 0, 2)
    before = manager.traffic.copy()
    manager.mark_written(first, on_device=True)
    manager.bring([second])
    since = manager.traffic.since(before)
    assert (since.h2d_bytes, since.d2h_bytes, since.evictions) == (64, 64, 1)
    assert manager.traffic.stall_s >= since.stall_s > 0
