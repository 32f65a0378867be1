"""Law 4, traffic: no unnecessary transfers. Law 5, ownership: one valid copy, and duplicates that may be dropped."""

from functools import cache

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from probes import after_allocations, manager_of, tracer_of
from sampling import drawn
from seeded import engine_of
from torch import nn
from toys import Shape, batches, mean_square, train

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._engine.engine import Engine
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar.testing import NoMeter

from .models import chunk_sizes, config, shapes, smallest_device_bytes


class RecordingManager(ChunkManager):
    """Chunk manager that records write-backs of chunks that were not modified."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.clean_write_backs = []
        start_eviction = self.transfers.start_eviction
        self.transfers.start_eviction = lambda chunk, tier: (self.record(chunk), start_eviction(chunk, tier))
        self.evict_to_host = self.cache.evict_to_host
        self.cache.evict_to_host = self.recorded_eviction

    def record(self, chunk):
        if chunk.host.valid or chunk.disk.valid:
            self.clean_write_backs.append(chunk)

    def recorded_eviction(self, chunk):
        clean = chunk.host.valid or chunk.disk.valid
        before = self.counters.d2h_bytes
        evicted = self.evict_to_host(chunk)
        if clean and self.counters.d2h_bytes != before:
            self.clean_write_backs.append(chunk)
        return evicted


@drawn(10, shapes, st.integers(0, 3000))
def test_unmodified_chunks_are_not_written_back(shape, spare_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar._engine.core.ChunkManager", RecordingManager)
        budget = smallest_device_bytes(shape, 256, "bf16") + spare_bytes
        engine = Engine(shape.build, config("bf16", 256, device_memory=budget), meter=NoMeter())
        train(engine, batches(3))
        assert not manager_of(engine).clean_write_backs
        engine.close()


def optimal_fetches(
    accesses: tuple[tuple[int, ...], ...], sizes: dict[int, int], capacity: int, present: frozenset[int]
) -> int:
    """Return the fewest bytes that any eviction order fetches for `accesses`, by brute force.

    `present`: the chunks that are on the device before.
    """

    @cache
    def best(position: int, present: frozenset[int]) -> int:
        if position == len(accesses):
            return 0
        needed = frozenset(accesses[position])
        cost = sum(sizes[chunk] for chunk in needed - present)
        idle = sorted(present - needed)
        room = capacity - sum(sizes[chunk] for chunk in needed)
        subsets = [frozenset(chunk for i, chunk in enumerate(idle) if mask >> i & 1) for mask in range(1 << len(idle))]
        feasible = [keep for keep in subsets if sum(sizes[chunk] for chunk in keep) <= room]
        return cost + min(best(position + 1, needed | keep) for keep in feasible)

    return best(0, present)


@drawn(10, st.integers(2, 5), st.integers(1, 4))
def test_a_planned_step_fetches_the_optimum(layers, chunks_that_fit):
    """With one equal chunk per layer, a planned step fetches the optimum that brute force finds for its trace."""
    shape = Shape(("plain",) * layers)
    assume(chunks_that_fit < layers + 2)  # the embedding and the head have a chunk each; if all fit, nothing moves
    chunk_bytes = 2 * ALIGN_NUMEL
    budget = chunks_that_fit * chunk_bytes
    engine = Engine(shape.build, config("bf16", chunk_bytes, device_memory=budget), meter=NoMeter())
    train(engine, batches(4))
    param16 = manager_of(engine).param16
    present = frozenset(index for index, chunk in param16.items() if chunk.device.valid)
    train(engine, batches(5)[4:])
    (trace,) = tracer_of(engine).traces.values()
    sizes = {chunk.index: chunk.compute_bytes for chunk in engine.layout.chunks}
    accesses = tuple(moment.chunks for moment in trace.moments if moment.chunks)
    h2d_bytes, fetched = engine.stats.last.h2d_bytes, []
    after_allocations(engine, lambda chunk: fetched.append(chunk.nbytes))
    train(engine, batches(1))
    assert sum(fetched) <= h2d_bytes, "the rest are lookups"
    assert sum(fetched) == optimal_fetches(accesses, sizes, budget, present)


class Experts(nn.Module):
    """Experts as rows of two parameters, of which each step uses others."""

    def __init__(self, width: int = 32, experts: int = 6) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(experts, width, width) / width**0.5) for _ in range(2))

    def forward(self, given: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, list[int]]:
        x, experts = given
        for expert in experts:
            x = x + torch.tanh(x @ self.up[expert]) @ self.down[expert]
        return x, experts


def test_experts_that_differ_in_each_step_move_each_parameter_twice():
    """No trace is followed. Each parameter comes for forward and backward, and its gradient goes: three times."""
    largest = 6 * 32 * 32 * 2
    options = config("bf16", largest // 2, device_memory=5 * largest)
    with Engine(lambda: nn.Sequential(*(Experts() for _ in range(6))), options, meter=NoMeter()) as engine:
        counters, nbytes = manager_of(engine).counters, engine.layout.param16_bytes
        for step in range(6):
            before = counters.h2d_bytes + counters.d2h_bytes
            experts = torch.randperm(6, generator=torch.Generator().manual_seed(step))[: 3 + step % 3].tolist()
            engine.backward(mean_square(engine((torch.ones(2, 32), experts))[0]))
            engine.optimizer.step()
            moved = counters.h2d_bytes + counters.d2h_bytes - before
            assert moved <= 3 * nbytes + engine.layout.optimizer_bytes * (step < 2), f"step {step}"
        before = counters.h2d_bytes
        for step in range(4):
            with torch.no_grad():
                engine((torch.ones(2, 32), [step, step + 1, step + 2]))
        assert counters.h2d_bytes - before <= 4 * (nbytes - 5 * largest + 4 * largest)


# Ownership: every chunk has a valid copy, and a duplicate may be dropped at any time


@drawn(8, shapes, chunk_sizes, st.integers(0, 3000), st.integers(0, 2**32))
def test_one_owner_and_duplicates_that_agree(shape, chunk_size, spare_bytes, seed):
    budget = smallest_device_bytes(shape, chunk_size, "bf16") + spare_bytes
    options = config("bf16", chunk_size, device_memory=budget)
    engine, dropping = engine_of(shape.build, options), engine_of(shape.build, options)
    for step in range(3):
        torch.manual_seed(step)
        losses = train(engine, batches(1))
        drop_duplicates(dropping, seed + step)
        torch.manual_seed(step)
        assert train(dropping, batches(1)) == losses
        for chunk in manager_of(engine).chunks.values():
            assert chunk.in_memory and not chunk.disk.valid
            if chunk.device.valid and chunk.host.valid:
                assert torch.equal(chunk.on_device(chunk.whole), chunk.on_host(chunk.whole))


def drop_duplicates(engine: Engine, seed: int) -> None:
    """Drop the host copy of random chunks that have two valid copies."""
    generator = torch.Generator().manual_seed(seed)
    manager = manager_of(engine)
    for chunk in manager.chunks.values():
        if chunk.device.valid and chunk.host.valid and torch.rand((), generator=generator) < 0.5:
            manager.host_tier.free(chunk)
