"""Inputs and outputs of modules: structures, keywords, inputs with and without gradient, unused outputs."""

import collections
import dataclasses

import pytest
import torch
import torch.nn as nn
from toys import mean_square
from transformers.utils import ModelOutput

from patrickstar import testing

from .zoo import (
    WIDTH,
    Stack,
    assert_blocks_exact,
    linear,
    normal,
    normal_batches,
    small_chunks,
    update,
)


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


class Packing(nn.Module):
    def __init__(self, structure):
        super().__init__()
        self.pack = STRUCTURES[structure][0]
        self.first, self.second = linear(), linear()

    def forward(self, x):
        return self.pack(self.first(x), torch.tanh(self.second(x)))


class Unpacking(nn.Module):
    def __init__(self, structure):
        super().__init__()
        self.unpack = STRUCTURES[structure][1]
        self.packing, self.after = Packing(structure), linear()

    def forward(self, x):
        first, second = self.unpack(self.packing(x))
        return self.after(first) * second


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_between_modules(structure, config, checkpointing):
    assert_blocks_exact(lambda: Unpacking(structure), config, checkpointing)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_from_the_model(structure, config):
    pack, unpack = STRUCTURES[structure]

    def loss_of(output, batch):
        assert type(output) is type(pack(torch.ones(1), torch.ones(1)))
        first, second = unpack(output)
        return mean_square(first * second)

    testing.assert_exact(lambda: Packing(structure), normal_batches(), config, loss_fn=loss_of)


class OneOutputUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x):
        x = self.first(x)
        return self.second(x), self.third(x)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_never_reaches_the_loss(used, config):
    def loss_of(output, batch):
        return mean_square(output[used])

    testing.assert_exact(OneOutputUsed, normal_batches(), config, loss_fn=loss_of)


class DropsOneOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.after = OneOutputUsed(), linear()

    def forward(self, x):
        self.inner(x)
        used, dropped = self.inner(x)
        return self.after(used) + dropped.detach()


class KeywordOnly(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, *, states, inputs):
            return self.linear(states) + inputs["scale"]

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner(states=x, inputs={"scale": x.detach().abs()})


class InputNeedsNoGrad(nn.Module):
    """The inner module's input is a constant, as for position embeddings."""

    def __init__(self):
        super().__init__()
        self.positions, self.after = nn.Sequential(linear(), nn.Tanh(), linear()), linear()

    def forward(self, x):
        return self.after(x) + self.positions(torch.ones_like(x))


class SameTensorTwice(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            y = self.linear(x)
            return y, y, x

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        first, second, same = self.inner(x)
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


@pytest.mark.parametrize(
    "block",
    [DropsOneOutput, KeywordOnly, InputNeedsNoGrad, SameTensorTwice, UserHooks],
    ids=lambda block: block.__name__,
)
def test_inputs_and_outputs_of_blocks(block, config, checkpointing):
    assert_blocks_exact(block, config, checkpointing)


class KeywordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = Stack([linear()])

    def forward(self, *, states, scale=None):
        return self.stack(states) if scale is None else self.stack(states) * scale


def test_keyword_only_inputs_of_the_model(config):
    batches = [{"states": normal(2, 3, WIDTH, seed=step), "scale": normal(WIDTH, seed=9)} for step in range(2)]
    testing.assert_exact(KeywordModel, [*batches, {"states": normal(2, 3, WIDTH, seed=2)}], config)


@pytest.mark.parametrize("model", [linear, lambda: Stack([linear()])], ids=["one layer", "stack"])
def test_gradient_of_an_input(model, config):
    def script(trainer, optimizer):
        seen = []
        for (x,) in normal_batches():
            x.requires_grad_()
            seen += [update(trainer, optimizer, mean_square(trainer(x))), x.grad]
        return seen

    testing.compare(model, config, script)


def test_saved_tensor_hooks_of_the_user(config):
    def script(trainer, optimizer):
        losses = []
        for (x,) in normal_batches():
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                loss = mean_square(trainer(x))
            losses.append(update(trainer, optimizer, loss))
        return losses

    testing.compare(lambda: Stack([linear(), linear()]), config, script)


def test_autocast_around_forward():
    def script(trainer, optimizer):
        losses = []
        for (x,) in normal_batches():
            with torch.autocast("cpu", torch.bfloat16):
                output = trainer(x)
            losses.append(update(trainer, optimizer, mean_square(output)))
        return losses

    testing.compare(lambda: Stack([linear(), linear()]), small_chunks("fp32"), script)
