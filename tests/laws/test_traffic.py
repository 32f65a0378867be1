"""Law 4: no byte moves without need."""

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patrickstar._engine.engine import Engine
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar.testing import NoMeter

from .models import Shape, config, shapes, smallest_device_bytes, train


class Ledger(ChunkManager):
    """Counts by itself what is written back, and what of it had not been written."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.clean_write_backs = []
        leave = self.transfers.start_eviction
        self.transfers.start_eviction = lambda chunk, tier: (self.note(chunk), leave(chunk, tier))

    def note(self, chunk):
        if chunk.host_valid or chunk.disk_valid:
            self.clean_write_backs.append(chunk)

    def _evict_to_host(self, chunk):
        clean = chunk.host_valid or chunk.disk_valid
        before = self.counters.d2h_bytes
        left = super()._evict_to_host(chunk)
        if clean and self.counters.d2h_bytes != before:
            self.clean_write_backs.append(chunk)
        return left


@settings(max_examples=10, deadline=None, print_blob=True)
@given(shapes, st.integers(0, 3000))
def test_what_was_not_written_is_not_written_back(shape, spare_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar._engine.core.ChunkManager", Ledger)
        budget = smallest_device_bytes(shape, 256, "bf16") + spare_bytes
        engine = Engine(shape.build, config("bf16", 256, device_memory=budget), meter=NoMeter())
        train(engine, 3)
        assert not engine._core.manager.clean_write_backs
        engine.close()


def optimal_fetches(accesses: tuple[tuple[int, ...], ...], sizes: dict[int, int], capacity: int) -> int:
    """The fewest bytes any eviction order can fetch over `accesses`, by trying all; nothing is there at first."""

    @cache
    def best(at: int, there: frozenset[int]) -> int:
        if at == len(accesses):
            return 0
        needed = frozenset(accesses[at])
        cost = sum(sizes[chunk] for chunk in needed - there)
        others = sorted(there - needed)
        room = capacity - sum(sizes[chunk] for chunk in needed)
        caching = [
            frozenset(chunk for i, chunk in enumerate(others) if mask >> i & 1) for mask in range(1 << len(others))
        ]
        feasible = [keep for keep in caching if sum(sizes[chunk] for chunk in keep) <= room]
        return cost + min(best(at + 1, needed | keep) for keep in feasible)

    return best(0, frozenset())


@settings(max_examples=10, deadline=None, print_blob=True)
@given(st.integers(2, 5), st.integers(1, 4))
def test_a_planned_step_fetches_the_optimum(layers, chunks_that_fit):
    """Equal chunks, one per layer: what a followed plan fetches is what brute force finds over its own trace."""
    shape = Shape(("plain",) * layers, tied=False, frozen_norms=False, checkpointing=False)
    assume(chunks_that_fit < layers + 2)  # the embedding and the head have a chunk each; if all fit, nothing moves
    chunk_bytes = 2 * ALIGN_NUMEL
    budget = chunks_that_fit * chunk_bytes
    engine = Engine(shape.build, config("bf16", chunk_bytes, device_memory=budget), meter=NoMeter())
    train(engine, 5)
    (trace,) = engine._core.tracer.traces.values()
    sizes = {chunk.index: chunk.compute_bytes for chunk in engine.layout.chunks}
    accesses = tuple(moment.chunks for moment in trace.moments if moment.chunks)
    lookups = engine.stats.last.h2d_bytes - (fetched := fetched_chunks(engine))
    assert lookups >= 0
    assert fetched == optimal_fetches(accesses, sizes, budget)
    engine.close()


def fetched_chunks(engine: Engine) -> int:
    """Bytes of chunks fetched in one more step."""
    taken = []
    compute = engine._core.manager.device_tier
    take = compute.allocate
    compute.allocate = lambda chunk: (taken.append(chunk.nbytes), take(chunk))
    train(engine, 1)
    return sum(taken)
