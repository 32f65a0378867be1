"""AdamW with 8-bit states: bytes, bits on every tier and in every update, checkpoints, and how far it is from AdamW."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from toys import mean_square, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar._kernels.adam_8bit import SQUARE_OFFSET, SQUARE_SHIFT, SQUARE_WORD, square_of, to_codes
from patrickstar.errors import ModelError
from patrickstar.testing import NoMeter, assert_same_bits

from .tiers import Room, blocks, chunk_sizes, compare, inputs, on_disk, options, rooms

EIGHT_BIT = ps.AdamW8bit(lr=1e-2, weight_decay=0.1)
many_blocks = partial(blocks, 16)
"""A model whose model data exceeds the host's buffers: a page of codes is at least a block of the disk."""
LOOPS = [{}, {"max_norm": 0.1}, {"accumulation": 2}]


def test_model_data_takes_8_bytes_per_parameter():
    engine = Engine(blocks, options("bf16", 9000, optimizer=EIGHT_BIT), meter=NoMeter())
    numel = sum(param.numel() for param in engine.module.parameters())
    assert engine.layout.model_data_bytes - engine.layout.padding_bytes == 8 * numel
    engine.close()


@settings(max_examples=draws(10), deadline=None, print_blob=True)
@given(st.sampled_from(["bf16", "fp16", "fp32"]), chunk_sizes, rooms, st.sampled_from(LOOPS))
def test_states_on_any_tier(tmp_path_factory, precision, chunk_size, room, loop):
    config = options(precision, chunk_size, optimizer=EIGHT_BIT)
    config = on_disk(many_blocks, config, tmp_path_factory.mktemp("swap"), inputs(1)[0], room)
    compare(many_blocks, config, lambda trainer, optimizer: train(trainer, inputs(4), **loop))


def test_muon_takes_it_for_the_other_parameters():
    config = options("bf16", 9000, optimizer=ps.Muon(lr=1e-2, adamw=EIGHT_BIT))
    testing.compare(blocks, config, lambda trainer, optimizer: train(trainer, inputs(3)))


@pytest.mark.parametrize("update", [ps.Delayed(after=2), None], ids=["delayed", "in the step"])
@pytest.mark.parametrize("optimizer", [EIGHT_BIT, ps.EMA(EIGHT_BIT, decay=0.9)], ids=["alone", "averaged"])
def test_other_updates(tmp_path, update, optimizer):
    config = options("bf16", 9000, optimizer=optimizer, update=update)
    config = on_disk(many_blocks, config, tmp_path, inputs(1)[0], Room(12_000, 12_000, 0.2))
    compare(many_blocks, config, lambda trainer, optimizer: train(trainer, inputs(5)))


def test_a_checkpoint_resumes_with_the_same_bits(tmp_path):
    config = options("bf16", 9000, optimizer=EIGHT_BIT)
    engine = testing.stressed(blocks, config)
    train(engine, inputs(4))
    engine.save(tmp_path / "saved")
    states = engine.optimizer.state_dict()
    expected = train(engine, inputs(8)[4:])
    engine.close()
    engine = testing.stressed(blocks, config)
    engine.load(tmp_path / "saved")
    assert_same_bits(expected, train(engine, inputs(8)[4:]), "losses")
    engine.close()
    engine, optimizer = ps.initialize(blocks, config)
    train(engine, inputs(1))
    optimizer.load_state_dict(states)
    for position, state in optimizer.state_dict()["state"].items():
        assert state["exp_avg_8bit"].dtype == torch.uint8
        assert_same_bits(states["state"][position], state, "states")
    engine.close()


def test_states_of_adamw_are_refused():
    engine, optimizer = ps.initialize(blocks, options("bf16", 9000))
    train(engine, inputs(1))
    states = optimizer.state_dict()
    engine.close()
    engine, optimizer = ps.initialize(blocks, options("bf16", 9000, optimizer=EIGHT_BIT))
    with pytest.raises(ModelError, match="exp_avg_8bit"):
        optimizer.load_state_dict(states)
    engine.close()


@settings(max_examples=draws(50), deadline=None)
@given(st.floats(2.0**-60, 2.0**12), st.integers(0, 1 << 30))
def test_rounding_has_the_exact_mean(value, seed):
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(1 << SQUARE_SHIFT, (20_000,), dtype=torch.int32, generator=generator)
    values = torch.full((20_000,), value) + SQUARE_OFFSET
    found = square_of(to_codes(values, SQUARE_WORD, random, SQUARE_SHIFT)).double()
    # The error of the mean is normal; 6 standard deviations occur once in a billion cases.
    least = max(found.std().item(), 1e-3 * value) / 20_000**0.5
    assert abs(found.mean().item() - value) <= 6 * least + 2.0**-22 * (value + SQUARE_OFFSET)


def test_it_trains_as_adamw_does():
    """Losses of a linear model, of which AdamW with states in fp32 reaches a ten thousandth."""
    losses = {}
    for name, optimizer in {"fp32": ps.AdamW(lr=1e-2), "8 bits": ps.AdamW8bit(lr=1e-2)}.items():
        generator = torch.Generator().manual_seed(0)
        target = torch.randn(64, 64, generator=generator) / 8
        torch.manual_seed(0)
        engine, _ = ps.initialize(torch.nn.Linear(64, 64, bias=False), options("fp32", 9000, optimizer=optimizer))
        for _ in range(400):
            x = torch.randn(32, 64, generator=generator)
            loss = mean_square(engine(x) - x @ target)
            engine.backward(loss)
            engine.optimizer.step()
        losses[name] = loss.item()
        engine.close()
    print(losses)
    assert losses["8 bits"] < 1.5 * losses["fp32"]
