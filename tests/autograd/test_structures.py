"""Inputs and outputs of modules: structures, keywords, inputs with and without gradient, unused outputs."""

import collections
import dataclasses

import pytest
import torch
import torch.nn as nn
from toys import mean_square, module, update
from transformers.utils import ModelOutput

from patrickstar import testing

from .zoo import WIDTH, Stack, assert_blocks_exact, linear, normal, normal_batches, small_chunks, trains


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class PairOutput(ModelOutput):
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None


class Holder:
    def __init__(self, first, second):
        self.first, self.second = first, second


NamedPair = collections.namedtuple("NamedPair", ["first", "second"])


def by_attribute(pair):
    return pair.first, pair.second


STRUCTURES = {
    "tuple": (lambda a, b: (a, b), lambda o: o),
    "list": (lambda a, b: [a, b], lambda o: o),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda o: (o["a"], o["b"])),
    "ordered dict": (lambda a, b: collections.OrderedDict(a=a, b=b), lambda o: (o["a"], o["b"])),
    "nested": (lambda a, b: (a, None, (3, {"b": [b, "text"]})), lambda o: (o[0], o[2][1]["b"][0])),
    "named tuple": (NamedPair, by_attribute),
    "dataclass": (Pair, by_attribute),
    "frozen dataclass": (FrozenPair, by_attribute),
    "dataclass in a tuple": (lambda a, b: (Pair(a, b), 1), lambda o: by_attribute(o[0])),
    "model output": (lambda a, b: PairOutput(first=a, second=b), by_attribute),
    "plain object": (Holder, by_attribute),
}


def packing(structure):
    pack = STRUCTURES[structure][0]
    return module(lambda m, x: pack(m.first(x), torch.tanh(m.second(x))), first=linear, second=linear)


def unpacking(structure):
    def forward(m, x):
        first, second = STRUCTURES[structure][1](m.packing(x))
        return m.after(first) * second

    return module(forward, packing=packing(structure), after=linear)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_between_modules(structure, config, recomputing):
    assert_blocks_exact(unpacking(structure), config, recomputing)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_from_the_model(structure, config):
    pack, unpack = STRUCTURES[structure]

    def loss_of(output, batch):
        assert type(output) is type(pack(torch.ones(1), torch.ones(1)))
        first, second = unpack(output)
        return mean_square(first * second)

    testing.assert_exact(packing(structure), normal_batches(), config, loss_fn=loss_of)


def two_outputs(m, x):
    x = m.first(x)
    return m.second(x), m.third(x)


one_output_used = module(two_outputs, first=linear, second=linear, third=linear)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_never_reaches_the_loss(used, config):
    testing.assert_exact(
        one_output_used, normal_batches(), config, loss_fn=lambda output, batch: mean_square(output[used])
    )


def drops_one_output(m, x):
    m.inner(x)
    used, dropped = m.inner(x)
    return m.after(used) + dropped.detach()


def same_tensor_twice(m, x):
    first, second, same = m.inner(x)
    return first * second + same


class UserHooks(nn.Module):
    """User hooks get the same values as without an engine."""

    def __init__(self):
        super().__init__()
        self.linear, self.after = linear(), linear()
        self.linear.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        self.after.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))

    def forward(self, x):
        return self.after(self.linear(x))


scaled = module(lambda m, *, states, inputs: m.linear(states) + inputs["scale"], linear=linear)
twice = module(lambda m, x: (y := m.linear(x), y, x), linear=linear)
BLOCKS = {
    "drops one output": module(drops_one_output, inner=one_output_used, after=linear),
    "keywords only": module(lambda m, x: m.inner(states=x, inputs={"scale": x.detach().abs()}), inner=scaled),
    # The inner module's input is a constant, as for position embeddings.
    "input needs no grad": module(
        lambda m, x: m.after(x) + m.positions(torch.ones_like(x)),
        positions=lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
        after=linear,
    ),
    "the same tensor twice": module(same_tensor_twice, inner=twice),
    "user hooks": UserHooks,
}


@pytest.mark.parametrize("block", BLOCKS)
def test_inputs_and_outputs_of_blocks(block, config, recomputing):
    assert_blocks_exact(BLOCKS[block], config, recomputing)


def test_keyword_only_inputs_of_the_model(config):
    build = module(lambda m, *, states, scale=1: m.stack(states) * scale, stack=lambda: Stack([linear()]))
    batches = [{"states": normal(2, 3, WIDTH, seed=step), "scale": normal(WIDTH, seed=9)} for step in range(2)]
    testing.assert_exact(build, [*batches, {"states": normal(2, 3, WIDTH, seed=2)}], config)


@pytest.mark.parametrize("model", [linear, lambda: Stack([linear()])], ids=["one layer", "stack"])
@trains(lambda model: model())
def test_gradient_of_an_input(trainer, optimizer):
    for (x,) in normal_batches():
        x.requires_grad_()
        yield update(trainer, mean_square(trainer(x)))
        yield x.grad


def two_layers():
    return Stack([linear(), linear()])


@trains(two_layers)
def test_saved_tensor_hooks_of_the_user(trainer, optimizer):
    for (x,) in normal_batches():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = mean_square(trainer(x))
        yield update(trainer, loss)


@trains(two_layers, small_chunks("fp32"))
def test_autocast_around_forward(trainer, optimizer):
    for (x,) in normal_batches():
        with torch.autocast("cpu", torch.bfloat16):
            output = trainer(x)
        yield update(trainer, mean_square(output))
