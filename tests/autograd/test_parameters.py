"""Parameters of every kind: frozen, scalar, empty, huge, of mixed dtypes, parametrized, saved by custom functions."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations
from toys import mean_square, module

from patrickstar import testing

from .zoo import WIDTH, Stack, assert_blocks_exact, linear, normal_batches, small_chunks, train, trains, update, weight


def mixed_dtypes(m, x):
    hidden = torch.tanh(m.low(x.to(m.low.weight.dtype)))
    return m.high(hidden.to(m.high.weight.dtype)).to(x.dtype)


class SavingMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        ctx.save_for_backward(x, matrix)
        return x @ matrix

    @staticmethod
    def backward(ctx, grad):
        x, matrix = ctx.saved_tensors
        return grad @ matrix.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class TwoMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, second):
        hidden = x @ first
        ctx.save_for_backward(x, hidden, first, second)
        return hidden @ second

    @staticmethod
    def backward(ctx, grad):
        x, hidden, first, second = ctx.saved_tensors
        through = grad @ second.t()
        return (
            through @ first.t(),
            x.flatten(0, 1).t() @ through.flatten(0, 1),
            hidden.flatten(0, 1).t() @ grad.flatten(0, 1),
        )


class StashingMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return x @ matrix

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.matrix.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class StashingModule(torch.autograd.Function):
    """Reads the weight from the module in forward and backward, not from its arguments."""

    @staticmethod
    def forward(ctx, x, matrix, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ module.weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.module.weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2), None


def norm():
    layer = nn.LayerNorm(WIDTH).requires_grad_(False)
    nn.init.uniform_(layer.weight)
    return layer


def frozen():
    return linear().requires_grad_(False)


def bias_only():
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer


larger_than_a_chunk = module(
    lambda m, x: m.down(torch.relu(m.up(x))),
    up=lambda: nn.Linear(WIDTH, 16 * WIDTH),
    down=lambda: nn.Linear(16 * WIDTH, WIDTH),
)
# A frozen base with a trainable low-rank correction.
adapter = module(
    lambda m, x: torch.tanh(m.base(x) + m.up(m.down(x))),
    base=frozen,
    down=lambda: nn.Linear(WIDTH, 2, bias=False),
    up=lambda: nn.Linear(2, WIDTH, bias=False),
)
wholly_frozen = module(
    lambda m, x: m.inner(x), inner=lambda: nn.Sequential(linear(), nn.GELU(), linear()).requires_grad_(False)
)
KINDS = {
    "scalar": module(
        lambda m, x: m.linear(x * m.scale) + m.scale, scale=lambda: nn.Parameter(torch.tensor(0.5)), linear=linear
    ),
    "empty": module(
        lambda m, x: F.linear(x, torch.cat([m.weight, m.nothing])),
        nothing=lambda: nn.Parameter(torch.empty(0, WIDTH)),
        weight=weight,
    ),
    "empty and unused": module(lambda m, x: m.linear(x), nothing=lambda: nn.Parameter(torch.empty(0)), linear=linear),
    "larger than a chunk": larger_than_a_chunk,
    "not contiguous": module(
        lambda m, x: F.linear(F.linear(x, m.weight), m.weight.t()),
        weight=lambda: nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t()),
    ),
    "weight norm": module(lambda m, x: m.linear(x), linear=lambda: parametrizations.weight_norm(linear())),
    "saved by a function": module(lambda m, x: SavingMatmul.apply(x, m.weight), weight=weight),
    "two saved by a function": module(lambda m, x: TwoMatmuls.apply(x, m.first, m.second), first=weight, second=weight),
    "stashed by a function": module(lambda m, x: StashingMatmul.apply(x, m.weight), weight=weight),
    "read from its module by a function": module(lambda m, x: StashingModule.apply(x, m.weight, m), weight=weight),
    "view stashed by a function": module(lambda m, x: StashingMatmul.apply(x, m.weight.t()), weight=weight),
    "frozen norm": module(lambda m, x: m.after(m.norm(m.before(x))), before=linear, norm=norm, after=linear),
    "adapter": adapter,
    "trainable bias only": module(lambda m, x: torch.tanh(m.linear(x)), linear=bias_only),
    "wholly frozen": wholly_frozen,
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_kind(kind, config, recomputing):
    assert_blocks_exact(KINDS[kind], config, recomputing)


def test_mixed_dtypes(config):
    build = module(mixed_dtypes, low=lambda: linear().to(torch.bfloat16), high=lambda: linear().to(torch.float32))
    testing.assert_exact(lambda: nn.Sequential(build(), build()), normal_batches(), config)


def test_spectral_norm_which_updates_buffers_from_weights(checkpointing):
    # Its buffers must have the weights' dtype, so plain PyTorch must run it in one precision.
    build = module(lambda m, x: m.linear(x), linear=lambda: parametrizations.spectral_norm(linear()))
    assert_blocks_exact(build, small_chunks("fp32"), checkpointing)


def test_frozen_base_with_adapters_alone_trainable(config):
    def adapted():
        model = Stack([adapter(), adapter()])
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    testing.assert_exact(adapted, normal_batches(), config)


def test_frozen_first_layers_whose_inputs_need_no_gradient(config):
    build = lambda: nn.Sequential(wholly_frozen(), wholly_frozen(), linear(), wholly_frozen())  # noqa: E731
    testing.assert_exact(build, normal_batches(), config)


def first_block(first_state, checkpointing):
    model = Stack([linear(), linear()], checkpointing)
    model.blocks[0].requires_grad_(first_state)
    return model


@pytest.mark.parametrize("first_state", [True, False], ids=["frozen-later", "unfrozen-later"])
@trains(first_block)
def test_a_parameter_changes_between_frozen_and_trainable(trainer, optimizer, first_state):
    for first, state in ((0, first_state), (2, not first_state), (4, first_state)):
        trainer.module.blocks[0].requires_grad_(state)
        yield from train(trainer, steps=2, first=first)


@trains(lambda: Stack([linear(), linear()]))
def test_everything_frozen_but_one_parameter_at_a_time(trainer, optimizer):
    """Block-wise training, as in layer-by-layer fine-tuning."""
    for step, (x,) in enumerate(normal_batches(4)):
        for index, block in enumerate(trainer.module.blocks):
            block.requires_grad_(index == step % 2)
        yield update(trainer, optimizer, mean_square(trainer(x)))


@pytest.mark.parametrize("chunk_bytes", [64, 256, 1024, 65536, "auto"])
def test_any_chunk_size(chunk_bytes, precision):
    config = small_chunks(precision, chunk_bytes=chunk_bytes)
    testing.assert_exact(lambda: Stack([larger_than_a_chunk(), adapter()]), normal_batches(), config)
