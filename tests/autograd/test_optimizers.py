"""Optimizers other than Adam: those of this package, of `torch.optim`, and user-defined ones."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.optim import lr_scheduler
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import ConfigError, PatrickStarError

from .optimizer_cases import OPTIMIZERS, SOME, Torch, build, plain_sgd
from .zoo import WIDTH, linear, module, normal, normal_batches, small_chunks, train


@pytest.fixture(params=["bf16", "fp16", "fp32"])
def precision(request):
    return request.param


@pytest.fixture(params=SOME)
def config(request, precision):
    return small_chunks(precision, optimizer=OPTIMIZERS[request.param])


# The same bits as plain PyTorch

WARM_UP = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, precision):
    testing.assert_exact(build, normal_batches(4), small_chunks(precision, optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", SOME)
def test_steps_where_everything_fits(name, recomputing):
    config = small_chunks("bf16", optimizer=OPTIMIZERS[name])
    testing.assert_exact(lambda: build(recomputing), normal_batches(4), config, stress=False)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3], ids=["clipped", "left alone"])
def test_clipping_and_accumulation(max_norm, config):
    testing.assert_exact(build, normal_batches(6), config, max_norm=max_norm, accumulation=2)


def test_a_learning_rate_schedule(config):
    testing.assert_exact(build, normal_batches(4), config, scheduler=WARM_UP)


def test_a_learning_rate_schedule_of_adamw(precision):
    testing.assert_exact(build, normal_batches(4), small_chunks(precision), scheduler=WARM_UP)


def test_a_schedule_that_moves_the_momentum_too(precision):
    """OneCycleLR changes the momentum of optimizers that have one."""
    config = small_chunks(precision, optimizer=ps.SGD(lr=0.1, momentum=0.9))

    def scheduler(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16)

    testing.assert_exact(build, normal_batches(4), config, scheduler=scheduler)


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
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[1]["weight_decay"] = 0.2
        losses += train(trainer, steps=2, first=2)
        optimizer.param_groups[0]["lr"] = 0.0
        return losses + train(trainer, steps=1, first=4)

    testing.compare(build, small_chunks(precision, optimizer=GROUPED[name]), script)


class Branches(nn.Module):
    """Parameters that get gradients only in some steps, so that their update counts differ."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = linear(), linear(), linear()
        self.last = True

    def forward(self, x):
        self.last = not self.last
        x = self.always(x)
        return self.sometimes(x) if self.last else x


def test_parameters_with_gradients_in_some_steps_only(config):
    testing.assert_exact(Branches, normal_batches(5), config)


def test_a_parameter_that_is_unfrozen_later(config):
    def frozen():
        model = build()
        model.stem.requires_grad_(False)
        return model

    def script(trainer, optimizer):
        losses = train(trainer, steps=2)
        trainer.module.stem.requires_grad_(True)
        return losses + train(trainer, steps=3, first=2)

    testing.compare(frozen, config, script)


def test_dense_strides_of_any_order(config):
    """A column-major weight and a channels-last weight."""

    def forward(m, x):
        return nn.functional.conv2d((x @ m.weight.t()).view(-1, 2, 4, 6), m.kernel)

    build = module(
        forward,
        weight=lambda: nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t()),
        kernel=lambda: nn.Parameter(torch.randn(3, 2, 3, 3).to(memory_format=torch.channels_last)),
    )
    testing.assert_exact(build, normal_batches(3, 2, 3, WIDTH), config)


def test_double_precision(config):
    """Half of the model in double precision, as are its masters and optimizer states."""
    half = {"single": linear, "double_": lambda: linear().double()}
    build = module(lambda m, x: m.double_(m.single(x.float()).double()), **half)
    testing.assert_exact(build, normal_batches(), config)


def test_a_step_that_overflows_changes_no_state():
    for name in SOME:
        engine = testing.stressed(build, small_chunks("fp16", optimizer=OPTIMIZERS[name]))
        before = engine.state_dict()
        engine.backward(mean_square(engine(normal(2, 3, WIDTH))) * 1e6)
        engine.optimizer.step()
        testing.assert_same_bits(before, engine.state_dict(), "parameters after an overflow")
        assert engine.optimizer.state_dict()["state"] == {}
        engine.close()


# Bytes


BYTES = {"ps: SGD": 6, "ps: SGD with momentum": 10, "ps: Lion": 10, "ps: AdamW, 8-bit": 8, "ps: a user's": 10}
BYTES |= {"torch: SGD": 6, "torch: SGD with momentum": 10, "torch: RMSprop": 10, "torch: RMSprop, centered": 18}
BYTES |= {"torch: NAdam": 14, "torch: AdamW": 14, "torch: AdamW, amsgrad": 18}


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


def test_adam_has_14():
    for optimizer in (ps.Adam(), ps.AdamW()):
        engine, _ = ps.initialize(build, small_chunks("bf16", optimizer=optimizer))
        assert {chunk.schema.bytes_per_param for chunk in engine.layout.chunks} == {14}
        engine.close()


# Refusals


def check_refused(optimizer, *words):
    with pytest.raises(ConfigError) as caught:
        ps.Config(optimizer=optimizer)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_class_that_takes_no_gradients_is_refused_by_name():
    check_refused(Torch.LBFGS, "LBFGS")
    check_refused(partial(Torch.LBFGS, lr=0.1), "LBFGS(lr=0.1)")


def test_an_optimizer_over_parameters_is_refused_with_what_to_give_instead():
    made = Torch.RMSprop([nn.Parameter(torch.zeros(2))])
    check_refused(made, "give the class", "functools.partial(torch.optim.RMSprop, lr=...)", "ps.AdamW(lr=...)")


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
        testing.compare(build, small_chunks("bf16", optimizer=chosen), script)
    except PatrickStarError as error:
        assert "momentum" in str(error)
