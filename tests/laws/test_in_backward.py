"""The laws with updates in backward and split masters (`ps.InBackward`): exactness on all tiers, bytes, errors."""

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from probes import manager_of
from sampling import drawn
from seeded import assert_same_model, engine_of, reference_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import batches, inputs, layers, mean_square, train, update

import patrickstar as ps
from patrickstar._autograd import interceptor
from patrickstar._engine.param_init import param_specs
from patrickstar._layout.schema import GRAD32
from patrickstar._params.local_shards import LocalShards
from patrickstar._step.optimizer_placement import OptimizerPlacement
from patrickstar.errors import BudgetError, ConfigError, ModelError, TrainingError

from . import models, tiers
from .test_dry_run import compare
from .tiers import on_disk, options, rooms, wide_shapes

WIDTH = 64
optimizers = st.sampled_from(
    [
        ps.AdamW(lr=1e-2, weight_decay=0.1),
        ps.AdamW(lr=0.3, betas=(0.3, 0.5), weight_decay=0.0),
        ps.Adam(lr=1e-2, weight_decay=0.1),
        ps.EMA(ps.AdamW(lr=1e-2), decay=0.9),
        ps.Lion(lr=1e-2),
        ps.AdamW8bit(lr=1e-2),
    ]
)
"""Those with split masters, and two with whole ones."""
build = partial(layers, WIDTH, 6, nn.Tanh)
in_backward = partial(options, "bf16", WIDTH * WIDTH * 2 + 256, update=ps.InBackward())
"""Configuration in which each layer has a chunk."""


def script(trainer, optimizer):
    return train(trainer, batches(4), update=True)


# Exactness


@drawn(120, wide_shapes, tiers.chunk_sizes, st.sampled_from(["bf16", "bf16", "fp32"]), optimizers, rooms, fast=5)
def test_bits_from_disk(tmp_path_factory, shape, chunk_size, precision, optimizer, room):
    config = options(precision, chunk_size, optimizer=optimizer, update=ps.InBackward())
    config = on_disk(shape.build, config, tmp_path_factory.mktemp("disk"), batches(1)[0], room)
    tiers.compare(shape.build, config, script, evict_everything=room.evict_everything)


@drawn(80, models.shapes, models.chunk_sizes, optimizers, st.sampled_from([0, 700, 12000]), st.booleans(), fast=5)
def test_bits_in_memory(shape, chunk_size, optimizer, more_bytes, evict_everything):
    least = models.smallest_device_bytes(shape, chunk_size, "bf16")
    config = options("bf16", chunk_size, optimizer=optimizer, update=ps.InBackward(), device_memory=least + more_bytes)
    reference = reference_of(shape.build, config)
    expected = script(reference, reference.optimizer)
    with engine_of(shape.build, config, evict_everything=evict_everything) as engine:
        found = script(engine, engine.optimizer)
        ps.testing.assert_same_bits(list(expected), list(found), "tensors returned by the script")
        assert_same_model(reference, engine)
        assert sum(kind == GRAD32 for kind, _ in manager_of(engine).chunks) <= 1, "gradients are left"


@torch.library.custom_op("in_backward::halved", mutates_args=("x",))
def halved(x: torch.Tensor) -> None:
    """Halve a tensor in place."""
    x.mul_(0.5)


WRITES = {
    "a part": lambda weight: weight[3:5].fill_(0.5),
    "what exceeds a limit": lambda weight: weight.clamp_(-0.01, 0.01),
    "an item": lambda weight: weight.__setitem__((slice(0, 3), slice(None)), 0.25),
    "by a function of several tensors": lambda weight: torch._foreach_mul_([weight], 0.5),
    "to a tensor": lambda weight: torch.mul(weight, 2, out=weight),
    "by an option": lambda weight: nn.functional.relu(weight, True),
    "by an operator of a library": lambda weight: halved(weight),
    "initial values": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("stress", [False, True], ids=["resident", "evicted"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_place_keeps_the_digits_of_the_rest(write, stress):
    """A split master loses the old parameter with a write, so that the engine has to know it before."""

    def steps(trainer, optimizer):
        results = []
        for number, batch in enumerate(inputs(4, WIDTH)):
            results.append(update(trainer, mean_square(trainer(*batch))))
            if number == 1:
                with torch.no_grad():
                    WRITES[write](trainer.module[2][0].weight)
        return results

    ps.testing.compare(build, in_backward(device_memory=60_000), steps, stress=stress)


def test_masters_that_are_ties_are_restored():
    """Half of them were rounded up, half down, and so are those of the opposite sign, infinity, NaN and zeros."""
    words = [0x3F80 + number << 16 | 0x8000 for number in range(60)] + [0x7F800000, 0x7FC00000, 0x80000000, 0x7F7FFFFF]
    signs = torch.tensor([0, 1], dtype=torch.int64)[:, None].expand(2, WIDTH) << 31
    values = (torch.tensor(words) ^ signs).to(torch.int32).view(torch.float32)
    values = torch.where(values.isnan(), torch.nan, values).repeat(WIDTH // 2, 1)
    found = []
    for more in (ps.InBackward(), None):
        with engine_of(build, in_backward().model_copy(update={"update": more})) as engine:
            engine.load_state_dict(engine.state_dict() | {"2.0.weight": values})
            ps.testing.assert_same_bits([values], [engine.state_dict()["2.0.weight"]], "masters")
            finite = torch.where(values.isfinite() & (values.abs() < 1e30), values, 0.1)
            engine.load_state_dict(engine.state_dict() | {"2.0.weight": finite})
            train(engine, inputs(3, WIDTH), update=True)
            engine.module[2][0].weight.data.mul_(0.3)
            engine.module[2][0].bias.data[1:] -= 1
            train(engine, inputs(3, WIDTH), update=True)
            found.append(engine.state_dict())
    ps.testing.assert_same_bits(*found, "parameters")


def test_a_write_that_is_not_known_as_one_is_refused(monkeypatch):
    monkeypatch.setattr(interceptor, "written_by", lambda func, args, kwargs: [])
    refused = pytest.raises(ModelError, match=r"0\.0\.weight.*a function that PatrickStar does not know")
    with engine_of(build, in_backward()) as engine, torch.no_grad(), refused:
        engine.module[0][0].weight.mul_(2)


def test_checkpoints_and_states_are_those_of_whole_masters(tmp_path):
    """Either kind of masters loads what the other has saved, in the middle of training."""

    def trained(first, count, load=None, **options_):
        config = in_backward(device_memory=60_000).model_copy(update=options_)
        engine = engine_of(build, config)
        if load is not None:
            load(engine)
        for batch in inputs(6, WIDTH)[first : first + count]:
            update(engine, mean_square(engine(*batch)))
        return engine

    with trained(0, 6) as expected, trained(0, 3) as split, trained(0, 3, update=None) as whole:
        for name, engine in (("split", split), ("whole", whole)):
            engine.save(tmp_path / name)
            state, optimizer = engine.state_dict(), engine.optimizer.state_dict()

            def assign(other, state=state, optimizer=optimizer):
                other.load_state_dict(state)
                other.optimizer.load_state_dict(optimizer)

            for more in ({}, {"update": None}):
                for load in (lambda other, folder=tmp_path / name: other.load(folder), assign):
                    with trained(3, 3, load, **more) as found:
                        assert_same_model(expected, found, f"from {name} masters: ")


def test_checkpoints_refer_to_no_pages_of_split_masters(tmp_path):
    config = on_disk(build, in_backward(), tmp_path, inputs(1, WIDTH)[0], tiers.Room())
    config = tiers.durable(config)
    with tiers.small_engine(build, config) as engine:
        train(engine, inputs(2, WIDTH), update=True)
        engine.save(tmp_path / "saved")
        train(engine, inputs(2, WIDTH), update=True)
        with tiers.loaded(build, config, tmp_path / "saved") as found:
            train(found, inputs(2, WIDTH), update=True)
            assert_same_model(engine, found)


class ReadThrice(nn.Module):
    """Reentrant checkpointing completes the gradients of `again` three times in a backward."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda y: self.again(y).tanh(), x, use_reentrant=True)
        return x


@pytest.mark.parametrize("device_memory", ["72KiB", "8MiB"])
def test_gradients_that_grow_three_times_in_a_backward(device_memory):
    config = in_backward(device_memory=device_memory)
    with engine_of(ReadThrice, config) as engine:
        losses = train(engine, inputs(4, WIDTH))
        trainer = reference_of(ReadThrice, config)
        assert losses == train(trainer, inputs(4, WIDTH))
        assert_same_model(trainer, engine)


def test_a_chunk_updated_in_part_from_disk(tmp_path):
    """One of its parameters is read again after its gradient, so that the step updates it, after the others."""
    shape = models.Shape(("plain", "attention"), checkpointing=True, width=WIDTH)
    config = options("fp32", 1000, update=ps.InBackward())
    config = on_disk(shape.build, config, tmp_path, batches(1)[0], tiers.Room())
    tiers.compare(shape.build, config, script)


# Bytes


def test_model_data_takes_twelve_bytes_and_no_more_gradients_exist_than_planned(monkeypatch):
    """From the first step on, also under checkpointing, and for states that were loaded."""
    most, add = [0], LocalShards.add_gradient_list

    def noted(shards, managed, tier):
        chunk = add(shards, managed, tier)
        most[0] = max(most[0], sum(each.nbytes for (kind, _), each in shards.manager.chunks.items() if kind == GRAD32))
        return chunk

    monkeypatch.setattr(LocalShards, "add_gradient_list", noted)
    shape = models.Shape(("mlp",) * 4, checkpointing=True, width=WIDTH)
    with engine_of(shape.build, options("bf16", 9000, update=ps.InBackward())) as engine:
        layout = engine.layout
        assert layout.model_data_bytes == 12 * sum(chunk.numel for chunk in layout.chunks)
        for number in range(3):
            loss = engine(*batches(1)[0])
            engine.backward(loss)
            assert {param.steps for param in engine.inspect().parameters} == {number + 1}, "not updated in backward"
            engine.optimizer.step()
        engine.load_state_dict(engine.state_dict())
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        update(engine, engine(*batches(1)[0]))
        assert 0 < most[0] <= layout.gradient_room_bytes < layout.param16_bytes // 2


def test_budgets_of_twelve_bytes_are_enough():
    """In which the same model without the option is refused."""
    model = partial(layers, WIDTH, 24, nn.Tanh, bias=False)
    with engine_of(model, in_backward()) as engine:
        parts = sum(chunk.numel for chunk in engine.layout.chunks), engine.layout.gradient_room_bytes
    numel, gradient_bytes = parts
    exchange = 4 * WIDTH * WIDTH * 2
    config = in_backward(device_memory=5 * WIDTH * WIDTH * 2, host_memory=12 * numel + gradient_bytes + exchange)
    with engine_of(model, config) as engine:
        train(engine, inputs(4, WIDTH), update=True)
        assert engine.stats.last.host_peak_model_bytes <= config.host_memory
    with pytest.raises(BudgetError):
        engine_of(model, config.model_copy(update={"update": None}))


@drawn(8, models.shapes, st.sampled_from([1000, 9000, "auto"]), st.integers(0, 4000), fast=2)
def test_bytes_equal_those_of_a_dry_run(shape, chunk_size, spare_bytes):
    device = models.smallest_device_bytes(shape, chunk_size, "bf16") + spare_bytes
    config = models.config("bf16", chunk_size, device_memory=device, host_memory=1 << 30, update=ps.InBackward())
    compare(shape.build, config)


def test_a_step_from_disk_writes_a_sixth_less(tmp_path, monkeypatch):
    """Of states on disk 10 bytes per parameter in place of 12, and no gradients; it reads as many."""
    monkeypatch.setattr(OptimizerPlacement, "replan", lambda placement, layout: None)  # no states in memory
    written = []
    for more in (None, ps.InBackward()):
        options_ = {"update": more, "disk": ps.Disk(tmp_path)}
        config = in_backward(device_memory=400_000, host_memory=200_000).model_copy(update=options_)
        with tiers.small_engine(tiers.many_blocks, config, speculates=False) as engine:
            counters, before = manager_of(engine).counters, 0
            for batch in inputs(4, WIDTH):
                before = counters.disk_write_bytes
                train(engine, [batch], update=True)
                tiers.assert_at_rest(engine)
            written.append((counters.disk_write_bytes - before) / engine.layout.numel)
    assert written == pytest.approx([12, 10], rel=0.03)  # there is some padding


# Errors


@pytest.fixture
def engine():
    with engine_of(build, in_backward()) as engine:
        yield engine


def test_what_the_option_promises_not_to_happen_is_refused(engine):
    (x,) = inputs(1, WIDTH)[0]
    with pytest.raises(TrainingError, match=r"update=ps.InBackward\(\) promises"):
        engine.backward(mean_square(engine(x)), accumulate=True)
    engine.backward(mean_square(engine(x)))
    with pytest.raises(TrainingError, match=r"clipping is not allowed after engine.backward\(loss\).*InBackward"):
        engine.clip_grad_norm_(1.0)
    engine.optimizer.step()
    mean_square(engine(x)).backward()
    with pytest.raises(TrainingError, match=r"second backward before optimizer.step\(\).*InBackward"):
        mean_square(engine(x)).backward()
    engine.optimizer.zero_grad()
    train(engine, inputs(2, WIDTH), update=True)


def test_a_second_moment_can_not_be_negative(engine):
    train(engine, inputs(1, WIDTH), update=True)
    weight = engine.module[0][0].weight
    before = engine.optimizer.state[weight]["exp_avg_sq"].clone()
    with pytest.raises(ModelError, match=r"exp_avg_sq.*0\.0\.weight.*negative"):
        engine.optimizer.state[weight]["exp_avg_sq"] = torch.full((WIDTH, WIDTH), -1.0)
    ps.testing.assert_same_bits([before], [engine.optimizer.state[weight]["exp_avg_sq"]], "second moments")
    engine.optimizer.state[weight]["exp_avg_sq"] = torch.full((WIDTH, WIDTH), 0.5)
    assert engine.optimizer.state[weight]["exp_avg_sq"].eq(0.5).all()


def test_configurations_that_can_not_update_in_backward_are_refused():
    with pytest.raises(ConfigError, match=r"InBackward.*fp16"):
        ps.Config(precision="fp16", update=ps.InBackward())
    with pytest.raises(ConfigError, match=r"InBackward.*fp16"):
        ps.Config(update=ps.InBackward()).with_precision("fp16")
    with pytest.raises(ConfigError, match=r"InBackward\(\) takes one process"):
        param_specs(build(), build(), in_backward(), {"0.0.weight": None})
    assert ps.Config(update={"name": "InBackward"}).updates_in_backward
    with pytest.raises(ConfigError, match="InBackward has no option 'after'"):
        ps.InBackward(after=3)
