"""In-place operators on inputs and outputs of modules."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from patrickstar import testing

from .zoo import WIDTH, assert_blocks_exact, linear, module, normal_batches


def activation_on_output(m, x):
    return m.after(F.relu_(m.linear(x).add_(1)))


def residual_added(m, x):
    hidden = m.first(x)
    hidden += m.second(torch.tanh(x))
    return hidden


def output_is_a_view(m, x):
    flat = m.inner(x)
    flat.mul_(2).relu_()
    return m.after(flat).view_as(x)


def output_is_its_input(m, x):
    hidden = m.linear(x)
    same = m.identity(hidden)
    same.add_(1)
    return m.after(hidden) + same


def output_is_a_view_of_its_input(m, x):
    hidden = m.linear(x)
    m.flatten(hidden).mul_(2)
    return m.after(hidden)


def writes_into_its_input(m, x):
    hidden = m.before(x)
    return m.inner(hidden) + hidden


def writes_into_its_buffer(m, x):
    x = m.linear(x)
    with torch.no_grad():
        m.running.lerp_(x.mean((0, 1)).to(m.running.dtype), 0.1)
    return x + m.running.to(x.dtype).clone()


def running():
    return nn.Buffer(torch.zeros(WIDTH))


view_of_a_linear = module(lambda m, x: m.linear(x).view(-1, WIDTH), linear=linear)
doubles_its_input = module(lambda m, x: m.linear(x.mul_(2)), linear=linear)
BLOCKS = {
    # Linear returns a view of a 3-D input, and none of a 2-D one.
    "activation on an output that is a view": module(activation_on_output, linear=linear, after=linear),
    "activation on an output that is none": module(
        lambda m, x: activation_on_output(m, x.flatten(0, 1)).view_as(x), linear=linear, after=linear
    ),
    "activation modules": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.SiLU(inplace=True)),
    "residual added in place": module(residual_added, first=linear, second=linear),
    "output is a view": module(output_is_a_view, inner=view_of_a_linear, after=linear),
    "output is its input": module(output_is_its_input, linear=linear, identity=nn.Identity, after=linear),
    "output is a view of its input": module(
        output_is_a_view_of_its_input, linear=linear, flatten=lambda: nn.Flatten(0, 1), after=linear
    ),
    "writes into its input": module(writes_into_its_input, before=linear, inner=doubles_its_input),
    "writes into its buffer": module(writes_into_its_buffer, linear=linear, running=running),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_writing_in_place(block, config, recomputing):
    assert_blocks_exact(BLOCKS[block], config, recomputing)


def test_in_place_activation_on_the_models_output(config):
    def loss_of(output, batch):
        return F.relu_(output).float().pow(2).mean()

    testing.assert_exact(lambda: nn.Sequential(linear(), linear()), normal_batches(), config, loss_fn=loss_of)
