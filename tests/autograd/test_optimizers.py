"""Optimizers of this package, of `torch.optim`, and user-defined ones; their states, saved and exchanged."""

import copy
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.optim import lr_scheduler
from toys import mean_square, module

import patrickstar as ps
from patrickstar.errors import ModelError, PatrickStarError

from .optimizer_cases import OPTIMIZERS, SOME, SignSGD, Torch, build, plain_sgd, plain_steps
from .zoo import WIDTH, linear, normal, normal_batches, small_chunks, through_a_file, train, trains


@pytest.fixture(params=["bf16", "fp16", "fp32"])
def precision(request):
    return request.param


@pytest.fixture(params=SOME)
def some_optimizer(request):
    return OPTIMIZERS[request.param]


@pytest.fixture
def config(some_optimizer, precision):
    return small_chunks(precision, optimizer=some_optimizer)


# The same bits as plain PyTorch

SCHEDULERS = {
    "every step": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "warm-up from zero": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 3),
    # Changes the momentum of optimizers that have one.
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=16),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, precision):
    ps.testing.assert_exact(build, normal_batches(4), small_chunks(precision, optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", SOME)
def test_steps_where_everything_fits(name, recomputing):
    config = small_chunks("bf16", optimizer=OPTIMIZERS[name])
    ps.testing.assert_exact(lambda: build(recomputing), normal_batches(4), config, stress=False)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3], ids=["clipped", "left alone"])
def test_clipping_and_accumulation(max_norm, config):
    ps.testing.assert_exact(build, normal_batches(6), config, max_norm=max_norm, accumulation=2)


def test_a_learning_rate_schedule(config):
    ps.testing.assert_exact(build, normal_batches(4), config, scheduler=SCHEDULERS["warm-up from zero"])


def decay_and_speed(model):
    """Return groups for matrices and for vectors (own learning rate); the head is in no group."""
    blocks = [p for name, p in model.named_parameters() if not name.startswith("head")]
    matrices, vectors = [p for p in blocks if p.dim() > 1], [p for p in blocks if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}]


def momentum_for_matrices(model):
    """Return groups in which only some parameters need the momentum state."""
    matrices, vectors = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "momentum": 0.0}]


GROUPED = {
    "AdamW": ps.AdamW(lr=1e-2, weight_decay=0.1, param_groups=decay_and_speed),
    "SGD": ps.SGD(lr=0.1, momentum=0.9, param_groups=decay_and_speed),
    "SGD, momentum in one": ps.SGD(lr=0.1, momentum=0.9, param_groups=momentum_for_matrices),
    "Lion": ps.Lion(lr=1e-2, param_groups=decay_and_speed),
    "RMSprop": ps.TorchOptimizer(kind=Torch.RMSprop, options={"lr": 1e-2}, param_groups=decay_and_speed),
}


@pytest.mark.parametrize("name", GROUPED)
def test_param_groups(name, precision):
    def script(trainer, optimizer):
        losses = train(trainer, steps=2)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["weight_decay"] = 0.5, 0.2
        losses += train(trainer, steps=2, first=2)
        optimizer.param_groups[0]["lr"] = 0.0
        return losses + train(trainer, steps=1, first=4)

    ps.testing.compare(build, small_chunks(precision, optimizer=GROUPED[name]), script)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_learning_rate_schedules_of_param_groups(scheduler, name, precision):
    config = small_chunks(precision, optimizer=GROUPED[name])
    ps.testing.assert_exact(build, normal_batches(4), config, scheduler=SCHEDULERS[scheduler])


def sometimes(m, x):
    return m.sometimes(m.always(x)) if m.calls % 2 == 0 else m.always(x)


def test_parameters_with_gradients_in_some_steps_only(config):
    """Their update counts differ."""
    ps.testing.assert_exact(module(sometimes, always=linear, sometimes=linear, never=linear), normal_batches(5), config)


def stem_frozen():
    model = build()
    model.stem.requires_grad_(False)
    return model


@trains(stem_frozen)
def test_a_parameter_that_is_unfrozen_later(trainer, optimizer):
    yield from train(trainer, steps=2)
    trainer.module.stem.requires_grad_(True)
    yield from train(trainer, steps=3, first=2)


def test_dense_strides_of_any_order(config):
    """A column-major weight and a channels-last weight."""

    def forward(m, x):
        return nn.functional.conv2d((x @ m.weight.t()).view(-1, 2, 4, 6), m.kernel)

    build = module(
        forward,
        weight=lambda: nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t()),
        kernel=lambda: nn.Parameter(torch.randn(3, 2, 3, 3).to(memory_format=torch.channels_last)),
    )
    ps.testing.assert_exact(build, normal_batches(3, 2, 3, WIDTH), config)


def test_double_precision(config):
    """Half of the model in double precision, as are its masters and optimizer states."""
    half = {"single": linear, "double_": lambda: linear().double()}
    build = module(lambda m, x: m.double_(m.single(x.float()).double()), **half)
    ps.testing.assert_exact(build, normal_batches(), config)


def test_a_step_that_overflows_changes_no_state():
    for name in SOME:
        engine = ps.testing.stressed(build, small_chunks("fp16", optimizer=OPTIMIZERS[name]))
        before = engine.state_dict()
        engine.backward(mean_square(engine(normal(2, 3, WIDTH))) * 1e6)
        engine.optimizer.step()
        ps.testing.assert_same_bits(before, engine.state_dict(), "parameters after an overflow")
        assert engine.optimizer.state_dict()["state"] == {}
        engine.close()


# Bytes


BYTES = {"ps: SGD": 6, "ps: SGD with momentum": 10, "ps: Lion": 10, "ps: AdamW, 8-bit": 8, "ps: a user's": 10}
BYTES |= {"torch: SGD": 6, "torch: SGD with momentum": 10, "torch: RMSprop": 10, "torch: RMSprop, centered": 18}
BYTES |= {"torch: NAdam": 14, "torch: AdamW": 14, "torch: AdamW, amsgrad": 18, "ps: Adam": 14}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter(name, precision):
    engine, _ = ps.initialize(build, small_chunks(precision, optimizer=OPTIMIZERS[name]))
    numel = sum(p.numel() for p in engine.module.parameters())
    layout, expected = engine.layout, BYTES[name] + (2 if precision == "fp32" else 0)
    assert {chunk.schema.bytes_per_param for chunk in layout.chunks} == {expected}
    assert layout.model_data_bytes - layout.padding_bytes == expected * numel
    train(engine, steps=1)
    held = engine.inspect()
    assert held.device.chunk_bytes + held.host.chunk_bytes == layout.model_data_bytes
    engine.close()


# Refusals


def with_momentum(model):
    return [{"params": list(model.parameters()), "momentum": 0.9}]


MOMENTUM_ELSEWHERE = {
    "in a group": (ps.SGD(lr=0.1, param_groups=with_momentum), lambda optimizer: None),
    "later": (ps.SGD(lr=0.1), lambda optimizer: optimizer.param_groups[0].update(momentum=0.9)),
    "from a schedule": (ps.SGD(lr=0.1), lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16)),
    "loaded": (ps.SGD(lr=0.1), lambda optimizer: optimizer.load_state_dict(plain_sgd(1, momentum=0.9)[1].state_dict())),
}


@pytest.mark.parametrize("where", MOMENTUM_ELSEWHERE)
def test_a_momentum_that_the_options_did_not_announce_is_right_or_refused_by_name(where):
    """Without a chunk list for the momentum, nothing may be written where it would be."""
    chosen, act = MOMENTUM_ELSEWHERE[where]

    def script(trainer, optimizer):
        act(getattr(optimizer, "inner", optimizer))
        return train(trainer)

    try:
        ps.testing.compare(build, small_chunks("bf16", optimizer=chosen), script)
    except PatrickStarError as error:
        assert "momentum" in str(error)


# State


@pytest.mark.parametrize("name", [None, "ps: counting", *SOME], ids=str)
def test_resuming(name, precision):
    """The engine loads states of PyTorch's optimizers and its own: of AdamW, and scalars of a user-defined rule."""
    config = small_chunks(precision, optimizer=OPTIMIZERS.get(name))
    saved, continued = [], []

    def save_and_go_on(trainer, optimizer):
        losses = train(trainer, steps=2)
        saved.append(through_a_file((trainer.state_dict(), optimizer.state_dict())))
        continued.append(train(trainer, steps=2, first=2) + list(trainer.state_dict().values()))
        return losses

    ps.testing.compare(build, config, save_and_go_on)
    for model_state, optimizer_state in saved:
        engine, optimizer = ps.initialize(build, config)
        engine.load_state_dict(model_state)
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        found = train(engine, steps=2, first=2) + list(engine.state_dict().values())
        if config.precision != "fp16" or "loss_scale" in optimizer_state:  # plain PyTorch does not store it there
            ps.testing.assert_same_bits(continued[0], found, "what follows the load")


def test_saving_right_after_loading_gives_the_same(config):
    engine, optimizer = ps.initialize(build, config)
    train(engine, steps=2)
    state = optimizer.state_dict()
    other, other_optimizer = ps.initialize(build, config)
    train(other, steps=1)
    other_optimizer.load_state_dict(copy.deepcopy(state))
    again = other_optimizer.state_dict()
    assert again["param_groups"] == state["param_groups"]
    assert again["loss_scale"] == state["loss_scale"]
    assert again["state"].keys() == state["state"].keys()
    for position, values in state["state"].items():
        ps.testing.assert_same_bits(values, again["state"][position], f"states of parameter {position}")


SGD_OPTIONS = [
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1},
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
@pytest.mark.parametrize("saved_by", ["torch", "the engine"])
def test_state_of_sgd_resumes_in_the_other(saved_by, options):
    """The momentum is loaded; SGD saves no step count and needs none."""
    model, optimizer = plain_sgd(2 if saved_by == "torch" else 0, **options)
    engine, ours = ps.initialize(build, small_chunks("fp32", optimizer=ps.SGD(**options)))
    if saved_by == "torch":
        engine.load_state_dict(model.state_dict())
        ours.load_state_dict(optimizer.state_dict())
        ps.testing.assert_same_bits(dict(model.state_dict()), engine.state_dict(), "parameters")
        for position, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(ours.state_dict()["state"][position][name], value)
    else:
        train(engine, steps=2)
        model.load_state_dict(engine.state_dict())
        optimizer.load_state_dict(ours.state_dict())
    plain_steps(model, optimizer, 2, first=2)
    train(engine, steps=2, first=2)
    # Equal up to the contracted operations that PyTorch's SGD uses where the machine has them.
    for name, value in model.state_dict().items():
        assert torch.allclose(engine.state_dict()[name], value, rtol=1e-5, atol=1e-7), name


def test_states_of_another_optimizer_are_refused(precision):
    engine, optimizer = ps.initialize(build, small_chunks(precision, optimizer=ps.SGD(lr=0.1)))
    train(engine, steps=1)
    saved = optimizer.state_dict()
    for other in (ps.SGD(lr=0.1, momentum=0.9), ps.Lion(), ps.AdamW(), SignSGD(), Torch.RMSprop):
        engine, optimizer = ps.initialize(build, small_chunks(precision, optimizer=other))
        with pytest.raises(ModelError, match=r"but this optimizer needs.*nothing was loaded"):
            optimizer.load_state_dict(saved)
