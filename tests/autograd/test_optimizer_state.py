"""State of optimizers: saved, loaded, exchanged with `torch.optim`, and refused where it does not fit."""

import copy

import pytest
import torch

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import ModelError

from .optimizer_cases import OPTIMIZERS, SOME, Counting, SignSGD, Torch, build, plain_sgd, plain_steps
from .zoo import small_chunks, through_a_file, train


@pytest.fixture(params=["bf16", "fp16", "fp32"])
def precision(request):
    return request.param


@pytest.fixture(params=SOME)
def config(request, precision):
    return small_chunks(precision, optimizer=OPTIMIZERS[request.param])


# State


def test_resuming(config):
    """PyTorch and the engine load each other's states."""
    saved, continued = [], []

    def save_and_go_on(trainer, optimizer):
        losses = train(trainer, steps=2)
        saved.append(through_a_file((trainer.state_dict(), optimizer.state_dict())))
        continued.append(train(trainer, steps=2, first=2) + list(trainer.state_dict().values()))
        return losses

    testing.compare(build, config, save_and_go_on)
    for model_state, optimizer_state in saved:
        engine, optimizer = ps.initialize(build, config)
        engine.load_state_dict(model_state)
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        found = train(engine, steps=2, first=2) + list(engine.state_dict().values())
        if config.precision != "fp16" or "loss_scale" in optimizer_state:  # plain PyTorch does not store it there
            testing.assert_same_bits(continued[0], found, "what follows the load")


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
        testing.assert_same_bits(values, again["state"][position], f"states of parameter {position}")


def test_the_scalar_of_a_user_defined_rule_is_saved(precision):
    config = small_chunks(precision, optimizer=Counting())
    engine, optimizer = ps.initialize(build, config)
    train(engine, steps=2)
    state = through_a_file((engine.state_dict(), optimizer.state_dict()))
    expected = train(engine, steps=2, first=2) + list(engine.state_dict().values())
    other, other_optimizer = ps.initialize(build, config)
    other.load_state_dict(state[0])
    other_optimizer.load_state_dict(state[1])
    found = train(other, steps=2, first=2) + list(other.state_dict().values())
    testing.assert_same_bits(expected, found, "what follows the load")


SGD_OPTIONS = [
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1},
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_state_of_torchs_sgd_resumes_in_the_engine(options):
    """The momentum is loaded; SGD saves no step count and needs none."""
    model, optimizer = plain_sgd(2, **options)
    engine, ours = ps.initialize(build, small_chunks("fp32", optimizer=ps.SGD(**options)))
    engine.load_state_dict(model.state_dict())
    ours.load_state_dict(optimizer.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value)
    for position, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(ours.state_dict()["state"][position][name], value)
    plain_steps(model, optimizer, 2, first=2)
    train(engine, steps=2, first=2)
    check_near(model, engine)


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_state_of_the_engines_sgd_resumes_in_torchs(options):
    engine, ours = ps.initialize(build, small_chunks("fp32", optimizer=ps.SGD(**options)))
    train(engine, steps=2)
    model, optimizer = plain_sgd(0, **options)
    model.load_state_dict(engine.state_dict())
    optimizer.load_state_dict(ours.state_dict())
    plain_steps(model, optimizer, 2, first=2)
    train(engine, steps=2, first=2)
    check_near(model, engine)


def check_near(model, engine):
    """Assert equality up to the contracted operations that PyTorch's SGD uses where the machine has them."""
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
