"""Optimizers whose updates need whole parameters: the bits of plain PyTorch on every tier and for any cut of chunks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from sampling import drawn
from seeded import assert_same_model
from toys import train
from transformers.optimization import Adafactor
from whole_parameter_cases import MUON, WIDTH, Model

import patrickstar as ps
from patrickstar.errors import BudgetError, ConfigError

from .models import precisions
from .test_other_adamw import EIGHT_BIT, SCHEDULE_FREE
from .tiers import chunk_sizes, compare, inputs, on_disk, options, rooms

OPTIMIZERS = MUON | {
    "Adafactor": ps.TorchOptimizer(kind=torch.optim.Adafactor, options={"lr": 1e-2}),
    "Adafactor of transformers": ps.TorchOptimizer(kind=Adafactor),
}
names = st.sampled_from(sorted(OPTIMIZERS))
loops = st.sampled_from([{}, {"update": True}, {"max_norm": 0.1}, {"accumulation": 2}])


@drawn(30, names, precisions, chunk_sizes, loops, fast=4)
def test_everything_evicted(name, precision, chunk_size, loop):
    loop = {} if precision == "fp16" and "update" in loop else loop
    config = options(precision, chunk_size, optimizer=OPTIMIZERS[name])
    ps.testing.compare(Model, config, lambda trainer, optimizer: train(trainer, inputs(4), **loop))


@drawn(30, names, precisions, chunk_sizes, loops, rooms, fast=4)
def test_states_on_disk(tmp_path_factory, name, precision, chunk_size, loop, room):
    loop = {} if precision == "fp16" and "update" in loop else loop
    folder = tmp_path_factory.mktemp("disk")
    config = options(precision, chunk_size, optimizer=OPTIMIZERS[name])
    workspace = 4 * 2 * WIDTH * WIDTH * config.optimizer.default_rules()[0].workspace_items
    room = replace(room, device_bytes=room.device_bytes + workspace)
    config = on_disk(Model, config, folder, inputs(1)[0], room)
    script = lambda trainer, optimizer: train(trainer, inputs(4), **loop)  # noqa: E731
    compare(Model, config, script, evict_everything=room.evict_everything)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_delayed_updates(name):
    config = options("bf16", 9000, optimizer=OPTIMIZERS[name], update=ps.Delayed(after=2))
    ps.testing.compare(Model, config, lambda trainer, optimizer: train(trainer, inputs(5)))


def test_bytes_per_parameter():
    """With Muon a matrix has 2 + 4 + 4 bytes per parameter, others have 14; with Adafactor all have 2 + 4."""
    engine, _ = ps.initialize(Model, options("bf16", 9000, optimizer=ps.Muon()))
    by_name = {name: chunk.schema.bytes_per_param for chunk in engine.layout.chunks for name in chunk.params}
    ten = {"square.weight", "turned", *(f"{kind}.{number}.weight" for kind in ("wide", "tall") for number in range(2))}
    assert by_name == {name: 10 if name in ten else 14 for name in by_name} and ten <= by_name.keys()
    engine, _ = ps.initialize(Model, options("bf16", 9000, optimizer=Adafactor))
    assert {chunk.schema.bytes_per_param for chunk in engine.layout.chunks} == {6}


def test_muon_of_torch_is_replaced_wherever_a_class_is_given():
    """It takes matrices only, and a model has other parameters."""
    for muon in (torch.optim.Muon, partial(torch.optim.Muon, lr=1e-2)):
        assert isinstance(ps.Config(optimizer=muon).optimizer, ps.Muon)
        averaged = ps.EMA(muon)
        assert isinstance(averaged.optimizer, ps.Muon)
    assert averaged.optimizer.lr == 1e-2


@pytest.mark.parametrize(
    "optimizer", [*OPTIMIZERS.values(), EIGHT_BIT, SCHEDULE_FREE], ids=[*OPTIMIZERS, "8 bits", "no schedule"]
)
def test_a_checkpoint_resumes_with_the_same_bits(optimizer, tmp_path):
    config = options("bf16", 9000, optimizer=optimizer)
    engine, resumed = ps.testing.stressed(Model, config), ps.testing.stressed(Model, config)
    train(engine, inputs(2))
    engine.save(tmp_path / "saved")
    expected = train(engine, inputs(4)[2:])
    resumed.load(tmp_path / "saved")
    ps.testing.assert_same_bits(expected, train(resumed, inputs(4)[2:]), "losses")
    assert_same_model(engine, resumed)


def test_a_parameter_that_is_unfrozen_later():
    def frozen():
        model = Model()
        model.square.requires_grad_(False)
        model.norm.requires_grad_(False)
        return model

    def script(trainer, optimizer):
        losses = train(trainer, inputs(2))
        trainer.module.square.requires_grad_(True)
        trainer.module.norm.requires_grad_(True)
        return losses + train(trainer, inputs(5)[2:])

    ps.testing.compare(frozen, options("bf16", 9000, optimizer=ps.Muon(lr=2e-2)), script)


def test_a_group_that_changes_its_rule_is_refused_by_name():
    engine = ps.testing.stressed(Model, options("bf16", 9000, optimizer=ps.Muon()))
    train(engine, inputs(1))
    engine.optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ConfigError, match="exp_avg"):
        train(engine, inputs(1))


def test_a_workspace_that_the_device_can_not_hold_is_refused_in_bytes():
    config = options("bf16", 1000, optimizer=ps.Muon(), device_memory=60_000, host_memory="4MiB")
    with pytest.raises(BudgetError, match="the optimizer, which updates whole parameters, 114688 bytes") as caught:
        ps.initialize(Model, config)
    activations = 30_000
    enough = config.model_copy(update={"device_memory": 60_000 + caught.value.short_bytes + activations})
    engine, _ = ps.initialize(Model, enough)
    train(engine, inputs(2))
