"""Saved activations on the host: the same bits, counted bytes, weights left alone."""

import gc
from functools import partial

import pytest
import torch
from probes import manager_of
from seeded import engine_of
from torch import nn
from toys import inputs, layers, mean_square

import patrickstar as ps
from patrickstar.errors import BudgetError

WIDTH, ROWS = 64, 256


batches = partial(inputs, width=WIDTH, rows=ROWS)


def build() -> nn.Module:
    return nn.Sequential(*layers(WIDTH, 3, nn.ReLU, partial(nn.LayerNorm, WIDTH)), nn.Dropout(0.1))


def config(**options) -> ps.Config:
    return ps.Config(device="cpu", chunk_size=4096, activation_offload=True, **options)


def test_bytes_go_out_come_back_and_are_given_back():
    engine = engine_of(build, config())
    thrown_away = engine(*batches(1)[0])
    away = engine.inspect().host.other_bytes
    assert away >= 3 * ROWS * WIDTH * 2, "each linear layer saves its input"
    assert engine.inspect().d2h_bytes == away, "each tensor goes once, however many nodes saved it"
    del thrown_away
    gc.collect()
    assert engine.inspect().host.other_bytes == 0
    loss = mean_square(engine(*batches(1)[0]))
    engine.backward(loss)
    del loss
    gc.collect()
    assert engine.inspect().host.other_bytes == 0
    engine.optimizer.step()
    assert engine.stats.last.host_peak_non_model_bytes == away
    engine.close()


def gradients(*, moved: bool) -> dict[str, torch.Tensor]:
    """Return those of one step, with activations that changed places in the arena after forward, or did not."""
    engine = engine_of(build, config())
    host = manager_of(engine).host_tier
    gap = host.allocate_block(4096)
    loss = mean_square(engine(*batches(1)[0]))
    if moved:
        host.release_block(gap)
        (arena,) = host.arenas
        take, refusals, last = arena.allocate, [None], arena._blocks[-1]
        start = last.start
        arena.allocate = lambda nbytes: refusals.pop() if refusals else take(nbytes)
        host.release_block(host.allocate_block(4096))
        del arena.allocate
        assert last.start == start - 4096, "nothing was compacted"
    engine.backward(loss)
    found = {name: engine.gradient(name) for name, _ in engine.module.named_parameters()}
    engine.close()
    return found


def test_copies_that_have_changed_places_come_back_whole():
    ps.testing.assert_same_bits(gradients(moved=False), gradients(moved=True), "gradients")


def test_a_host_budget_that_is_too_small_is_an_error_in_bytes():
    whole = engine_of(build, config()).layout.model_data_bytes
    engine = engine_of(build, config(host_memory=whole + 1000))
    with pytest.raises(BudgetError, match=r"activation needs \d+ bytes on the host.*Raise host_memory by at least"):
        engine(*batches(1)[0])
    engine.close()
