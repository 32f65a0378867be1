"""Save, load, copy and read a managed model."""

import copy
import io

import numpy
import pytest
import torch
import torch.nn as nn
from toys import mean_square

import patrickstar as ps
from patrickstar import testing

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, through_a_file, train, trains


def build():
    return Stack([mlp(), nn.Sequential(linear(), nn.LayerNorm(WIDTH))])


@pytest.mark.parametrize("when", ["after forward", "after backward"])
@trains(build)
def test_loading_in_the_middle_of_a_step(trainer, optimizer, when):
    yield from train(trainer, steps=1)
    state = {name: value.clone() for name, value in trainer.state_dict().items()}
    yield from train(trainer, steps=1, first=1)
    loss = mean_square(trainer(normal(2, 3, WIDTH)))
    if when == "after backward":
        trainer.backward(loss)
        optimizer.zero_grad()
    trainer.load_state_dict(state)
    yield from train(trainer, steps=2)


@pytest.mark.parametrize("when", ["after forward", "after backward"])
@trains(build)
def test_saving_in_the_middle_of_a_step(trainer, optimizer, when):
    for (x,) in normal_batches():
        loss = mean_square(trainer(x))
        if when == "after forward":
            yield from [value.clone() for value in trainer.state_dict().values()]
        trainer.backward(loss)
        if when == "after backward":
            yield from [value.clone() for value in trainer.state_dict().values()]
        optimizer.step()
        optimizer.zero_grad()


def test_one_saved_parameter_takes_only_its_own_bytes(config):
    engine, _ = ps.initialize(lambda: nn.Sequential(*[linear() for _ in range(50)]), config)
    for state in (engine.state_dict(), engine.module.state_dict()):
        file = io.BytesIO()
        torch.save({"0.weight": state["0.weight"]}, file)
        assert len(file.getvalue()) < 4096


READERS = {
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "tolist": lambda p: torch.tensor(p.tolist()).reshape(p.shape),
    "numpy": lambda p: torch.tensor(p.detach().float().numpy()),
    "numpy array": lambda p: torch.tensor(numpy.asarray(p.detach().float())),
    "dlpack": lambda p: torch.from_dlpack(p.detach(), copy=True),
    "item": lambda p: torch.tensor([each.item() for each in p.flatten()]).reshape(p.shape),
    "storage": lambda p: torch.tensor(list(p.detach().clone().untyped_storage()), dtype=torch.uint8),
    "torch.save": lambda p: through_a_file(p).detach().to(p.dtype),
    "to": lambda p: p.to(torch.float64).detach(),
    "type": lambda p: p.type(torch.float32).detach(),
    "cpu": lambda p: p.cpu().detach().clone(),
    "deepcopy": lambda p: copy.deepcopy(p).detach().to(p.dtype),
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"].clone(),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]).detach().reshape(p.shape),
}


@pytest.mark.parametrize("reader", READERS)
@trains(build)
def test_reading_weights_between_steps(trainer, optimizer, reader):
    for step in range(2):
        yield from train(trainer, steps=1, first=step)
        yield from [READERS[reader](p) for p in trainer.module.parameters()]


def test_printing_a_weight_shows_its_values(config):
    engine, _ = ps.initialize(build, config)
    train(engine, steps=1)
    assert "nan" not in repr(engine.module.head.bias)
    assert f"{engine.module.head.bias[0].item():.4f}" in repr(engine.module.head.bias)


def test_writing_weights_between_steps(config):
    """Write under no_grad, as for re-initialization: written elements change the full-precision master too."""
    engine, optimizer = ps.initialize(build, config)
    train(engine, steps=1)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    expected["head.weight"].fill_(2.0)
    expected["stem.weight"][0] = 0.0
    with torch.no_grad():
        engine.module.head.weight.fill_(2.0)
        engine.module.stem.weight[0].zero_()
    testing.assert_same_bits(expected, engine.state_dict(), "parameters as written")

    loaded, loaded_optimizer = ps.initialize(build, config)
    loaded.load_state_dict(expected)
    loaded_optimizer.load_state_dict(optimizer.state_dict())
    losses, expected_losses = train(engine), train(loaded)
    testing.assert_same_bits(expected_losses, losses, "losses after writing")


COPIES = {"deepcopy": copy.deepcopy, "torch.save": lambda module: through_a_file(module, weights_only=False)}


@pytest.mark.parametrize("method", COPIES)
def test_a_copy_is_a_plain_independent_module_in_full_precision(method, config):
    def seeded():
        torch.manual_seed(0)
        return build()

    engine, _ = ps.initialize(seeded, config)
    train(engine, steps=1)
    twin = COPIES[method](engine.module)
    names = [name for name, _ in engine.module.named_parameters()]
    assert [name for name, _ in twin.named_parameters()] == names
    assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in twin.parameters())
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    testing.assert_same_bits(dict(engine.state_dict(names)), before, "the copy")
    expected = train(ps.initialize(seeded, config)[0], steps=2)[1:]
    testing.assert_same_bits(expected, train(engine, steps=1, first=1), "a step after the copy")
    testing.assert_same_bits(before, {name: p.detach() for name, p in twin.named_parameters()}, "the copy after a step")

    mean_square(twin(normal(2, 3, WIDTH))).backward()
    with torch.no_grad():
        for p in twin.parameters():
            p.sub_(p.grad)
    testing.assert_same_bits(dict(engine.state_dict(names)), dict(engine.module.state_dict()), "the engine")


def zeros_in_half_precision(module):
    return {name: torch.zeros(value.shape, dtype=torch.float16) for name, value in module.state_dict().items()}


REPLACEMENTS = {
    "load with assign": lambda module: module.load_state_dict(zeros_in_half_precision(module), assign=True),
    "another parameter": lambda module: setattr(module.stem, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to dtype": lambda module: module.to(torch.float16),
    "to meta": lambda module: module.to("meta"),
    "one more parameter": lambda module: setattr(module.stem, "weight_2", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_replacing_parameters_is_refused_by_name(replacement, config):
    engine, _ = ps.initialize(build, config)
    train(engine, steps=1)
    with pytest.raises(ps.errors.ModelError, match=r"stem\."):
        REPLACEMENTS[replacement](engine.module)
        engine(normal(2, 3, WIDTH))


def test_the_users_parameters_stay_the_users_objects(config):
    module = build()
    parameters = dict(module.named_parameters())
    engine, optimizer = ps.initialize(module, config)
    train(engine)
    assert engine.module is module
    assert list(dict(module.named_parameters())) == list(parameters)
    assert all(found is parameters[name] for name, found in module.named_parameters())
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(module.parameters())
