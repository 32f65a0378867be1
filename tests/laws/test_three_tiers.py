"""The laws with a disk tier: exactness, budgets, traffic, ownership, leaks."""

import contextlib
import gc

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from probes import after_operators, manager_of
from sampling import drawn
from seeded import reference_of
from torch import nn
from toys import Shape, batches, mean_square, module, train

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._tiers.disk_tier import STAGES
from patrickstar._tiers.host_tier import HostTier
from patrickstar.errors import BudgetError

from . import tiers
from .models import Waves, precisions
from .tiers import Room, blocks, inputs, many_blocks, on_disk, options, rooms, small_engine, wide_shapes

loops = st.sampled_from(
    [{}, {"update": True}, {"max_norm": 0.1}, {"accumulation": 2}, {"accumulation": 3, "max_norm": 0.1}]
)


@drawn(310, wide_shapes, tiers.chunk_sizes, precisions, rooms, loops, st.booleans(), fast=3)
def test_exactness(folder, shape, chunk_size, precision, room, loop, checksums):
    assume(precision != "fp16" or "update" not in loop)
    config = on_disk(shape.build, options(precision, chunk_size), folder, batches(1)[0], room)
    config = config.model_copy(update={"disk": ps.Disk(directory=folder, checksums=checksums)})
    script = lambda trainer, optimizer: train(trainer, batches(4), **loop)  # noqa: E731
    tiers.compare(shape.build, config, script, evict_everything=room.evict_everything)


@pytest.mark.parametrize("before", [0, 2])
def test_the_first_sums_of_gradients_find_room(folder, before):
    """Without them the states of a chunk would fit on the device."""
    shape = Shape(("plain", "plain"), tied=True, frozen_norms=False, checkpointing=False, width=tiers.WIDTH)
    config = on_disk(shape.build, options("fp32", "auto"), folder, batches(1)[0], Room(device_bytes=60000))

    def script(trainer, optimizer):
        return train(trainer, batches(before)) + train(trainer, batches(4), accumulation=2)

    tiers.compare(shape.build, config, script)


def test_activations_may_need_the_disk_though_memory_holds_all_chunks(tmp_path):
    """A disk that is configured is there for them: memory enough for the chunks alone turns no run into a refusal."""
    config = options("fp32", device_memory=180_000, host_memory=330_000)  # chunks have 405,504 bytes
    script = lambda trainer, optimizer: train(trainer, inputs(4))  # noqa: E731
    with small_engine(blocks, config, meter=Waves(160_000)) as engine, pytest.raises(BudgetError, match="host is full"):
        script(engine, engine.optimizer)
    tiers.compare(blocks, config.model_copy(update={"disk": ps.Disk(tmp_path)}), script, meter=Waves(160_000))


def recurrent(m, x):
    """Use several parameters in one operator, and an embedding whose weight stays on the host."""
    ids = (x.float().abs() * 100).long() % 500 if x.is_floating_point() else x
    return m.lstm(m.words(ids))[0]


def mixed(m, x):
    """Use parameters of three dtypes, and buffers."""
    x = m.norm(m.first(x.float()))
    return m.wide(x.to(m.wide.weight.dtype)) * m.scale


class Tied(nn.Module):
    """Model with a tied weight, a weight used by a function, and an unused weight."""

    def __init__(self):
        super().__init__()
        self.blocks = blocks(5)
        self.blocks[4][0].weight = self.blocks[1][0].weight
        self.spare = nn.Linear(tiers.WIDTH, tiers.WIDTH)

    def forward(self, x):
        return nn.functional.linear(self.blocks(x), self.blocks[2][0].weight)


WIDE = (tiers.WIDTH, tiers.WIDTH)
words_and_lstm = {"words": lambda: nn.Embedding(500, tiers.WIDTH), "lstm": lambda: nn.LSTM(*WIDE, 2, batch_first=True)}
dtypes = {
    "first": lambda: blocks(3),
    "wide": lambda: nn.Linear(*WIDE).double(),
    "norm": lambda: nn.BatchNorm1d(WIDE[0]),
}
dtypes["scale"] = lambda: nn.Parameter(torch.ones((), dtype=torch.float64))
UNUSUAL = {"recurrent": module(recurrent, **words_and_lstm), "mixed": module(mixed, **dtypes), "tied": Tied}


@pytest.mark.parametrize("model", UNUSUAL)
@pytest.mark.parametrize(("evict_everything", "host_share"), [(False, 0.0), (False, 0.4), (True, 0.4)])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_unusual_models(tmp_path, model, evict_everything, host_share, precision):
    build, room = UNUSUAL[model], Room(host_share=host_share, evict_everything=evict_everything)
    config = on_disk(build, options(precision), tmp_path, inputs(1)[0], room)
    tiers.compare(build, config, lambda trainer, _: train(trainer, inputs(4)), evict_everything=evict_everything)


@pytest.mark.parametrize("evict_everything", [False, True])
def test_offloaded_activations_beside_staging_buffers(tmp_path, evict_everything):
    """Offload 16 activations of 5 KiB."""
    config = on_disk(many_blocks, options(), tmp_path, inputs(1)[0], Room(device_bytes=120000, host_bytes=300000))
    config = config.model_copy(update={"activation_offload": True})
    script = lambda trainer, _: train(trainer, inputs(4, rows=40))  # noqa: E731
    tiers.compare(many_blocks, config, script, evict_everything=evict_everything)


# Budgets


class Watched(ChunkManager):
    """Chunk manager that checks the law at each allocation."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        allocate = self.device_tier.allocate
        self.device_tier.allocate = lambda chunk: (allocate(chunk), check_budgets(self, chunk))
        poll_transfers = self.cache.poll_transfers
        self.cache.poll_transfers = lambda: (poll_transfers(), check_budgets(self))


class WatchedHost(HostTier):
    """Host tier that checks the law at each allocation; all allocations use `_new_block`."""

    def _new_block(self, nbytes, description):
        place = super()._new_block(nbytes, description)
        in_arenas = sum(block.nbytes for arena in self.arenas for block in arena._blocks)
        threads = self.used + self.other_bytes + nbytes - in_arenas
        assert threads in (0, STAGES * tiers.PAGE_BYTES), "only the buffers of the disk's threads are outside the arena"
        assert in_arenas + threads <= self.budget_bytes
        assert place.end <= place.arena.nbytes and self.arena_bytes <= self.budget_bytes
        return place


def check_budgets(manager, *newcomers):
    assert manager.device_tier.used <= manager.device_tier.chunkable_bytes
    assert manager.host_tier.used + manager.host_tier.other_bytes <= manager.host_tier.budget_bytes
    assert tiers.real_bytes({*manager.chunks.values(), *newcomers}) == (
        manager.device_tier.used,
        manager.host_tier.used,
    )
    if manager.disk_tier is not None:
        file = manager.disk_tier.file
        assert file.used_bytes <= file.nbytes <= (file.capacity_bytes or file.nbytes)


@drawn(8, wide_shapes, tiers.chunk_sizes, precisions, rooms, st.integers(0, 3000), loops)
def test_all_budgets_hold_at_every_moment(folder, shape, chunk_size, precision, room, wave_bytes, loop):
    assume(precision != "fp16" or "update" not in loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar._engine.core.ChunkManager", Watched)
        patch.setattr("patrickstar._chunks.chunk_manager.HostTier", WatchedHost)
        config = on_disk(shape.build, options(precision, chunk_size), folder, batches(1)[0], room)
        config = config.model_copy(update={"device_memory": int(config.device_memory) + wave_bytes})
        tiny = config.model_copy(update={"disk": ps.Disk(directory=folder, capacity=4096)})
        capacity = 4095 + tiers.least_host_bytes(shape.build, tiny) + (1 << 20 if "accumulation" in loop else 0)
        config = config.model_copy(update={"disk": ps.Disk(directory=folder, capacity=capacity)})
        engine = small_engine(shape.build, config, meter=Waves(wave_bytes), evict_everything=room.evict_everything)
        try:
            assume(engine.inspect().disk is not None)
            train(engine, batches(4), **loop)
            tiers.assert_at_rest(engine)
            assert engine.stats.total.device_peak_model_bytes <= config.device_memory
            assert engine.stats.total.host_peak_model_bytes <= config.host_memory
        finally:
            engine.close()


# Ownership and leaks


@drawn(5, wide_shapes, tiers.chunk_sizes, rooms)
def test_every_chunk_has_a_valid_copy_and_duplicates_agree_after_every_operator(folder, shape, chunk_size, room):
    config = on_disk(shape.build, options("bf16", chunk_size), folder, batches(1)[0], room)
    with contextlib.closing(small_engine(shape.build, config, evict_everything=room.evict_everything)) as engine:
        assume(engine.inspect().disk is not None)
        chunks = manager_of(engine).chunks

        def check():
            idle = [chunk for chunk in chunks.values() if not (chunk.device.writer or chunk.device.reader)]
            tiers.assert_one_owner(chunk for chunk in idle if not chunk.pins)

        with after_operators(engine, check):
            train(engine, batches(4))


def test_two_engines_can_share_a_directory(tmp_path):
    config = on_disk(blocks, options(), tmp_path, inputs(1)[0], Room(host_bytes=20000))

    def run(count):
        engines = [small_engine(blocks, config) for _ in range(count)]
        losses = []
        for batch in inputs(4):
            outputs = [mean_square(engine(*batch)) for engine in engines]
            for engine, loss in zip(engines, outputs, strict=True):
                engine.backward(loss)
            for engine in engines:
                engine.optimizer.step()
            losses.append(outputs[0].detach())
        assert len({engine.inspect().disk.path for engine in engines}) == count
        for engine in engines:
            engine.close()
        return [*losses, *engines[0].module.state_dict().values()]

    ps.testing.assert_same_bits(run(1), run(2), "losses and parameters of the first")
    assert not tiers.worker_threads() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("closed", [False, True])
def test_an_engine_finishes_deferred_updates_when_it_is_closed_or_collected(tmp_path, closed):
    config = on_disk(blocks, options(), tmp_path, inputs(1)[0], Room())
    before = tiers.open_files()
    reference = reference_of(blocks, config)
    train(reference, inputs(2))
    engine = small_engine(blocks, config)
    train(engine, inputs(2))
    assert any(param.update_pending for param in engine.inspect().parameters) and tiers.worker_threads()
    module = engine.module
    if closed:
        engine.close()
    else:
        del engine
        gc.collect()
    ps.testing.assert_same_bits(reference.state_dict(), module.state_dict(), "parameters")
    assert not tiers.worker_threads() and tiers.open_files() == before and not list(tmp_path.iterdir())
