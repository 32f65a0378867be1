"""Parameters of every kind: frozen, scalar, empty, huge, of mixed dtypes, parametrized, saved by custom functions."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations
from toys import mean_square

from patrickstar import testing

from .zoo import (
    WIDTH,
    Stack,
    assert_blocks_exact,
    linear,
    normal_batches,
    small_chunks,
    train,
    update,
    weight,
)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(0.5)), linear()

    def forward(self, x):
        return self.linear(x * self.scale) + self.scale


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing, self.weight = nn.Parameter(torch.empty(0, WIDTH)), weight()

    def forward(self, x):
        return F.linear(x, torch.cat([self.weight, self.nothing]))


class EmptyAndUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing, self.linear = nn.Parameter(torch.empty(0)), linear()

    def forward(self, x):
        return self.linear(x)


class LargerThanAChunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Transposed(nn.Module):
    """Linear with a non-contiguous weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())

    def forward(self, x):
        return F.linear(F.linear(x, self.weight), self.weight.t())


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = linear().to(torch.bfloat16), linear().to(torch.float32)

    def forward(self, x):
        hidden = torch.tanh(self.low(x.to(self.low.weight.dtype)))
        return self.high(hidden.to(self.high.weight.dtype)).to(x.dtype)


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = parametrizations.weight_norm(linear())

    def forward(self, x):
        return self.linear(x)


class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(linear())

    def forward(self, x):
        return self.linear(x)


class SavingMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        ctx.save_for_backward(x, matrix)
        return x @ matrix

    @staticmethod
    def backward(ctx, grad):
        x, matrix = ctx.saved_tensors
        return grad @ matrix.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


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


class ModuleStashingMatmul(torch.autograd.Function):
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


class SavedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight()

    def forward(self, x):
        return SavingMatmul.apply(x, self.weight)


class StashedByFunction(SavedByFunction):
    def forward(self, x):
        return StashingMatmul.apply(x, self.weight)


class ReadFromModuleByFunction(SavedByFunction):
    def forward(self, x):
        return ModuleStashingMatmul.apply(x, self.weight, self)


class ViewStashedByFunction(SavedByFunction):
    def forward(self, x):
        return StashingMatmul.apply(x, self.weight.t())


class FrozenNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.norm, self.after = linear(), nn.LayerNorm(WIDTH), linear()
        nn.init.uniform_(self.norm.weight)
        self.norm.requires_grad_(False)

    def forward(self, x):
        return self.after(self.norm(self.before(x)))


class Adapter(nn.Module):
    """A frozen base with a trainable low-rank correction."""

    def __init__(self):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class TrainableBiasOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.linear.weight.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class WhollyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.GELU(), linear()).requires_grad_(False)

    def forward(self, x):
        return self.inner(x)


KINDS = [
    Scalar,
    Empty,
    EmptyAndUnused,
    LargerThanAChunk,
    Transposed,
    WeightNorm,
    SavedByFunction,
    StashedByFunction,
    ReadFromModuleByFunction,
    ViewStashedByFunction,
    FrozenNorm,
    Adapter,
    TrainableBiasOnly,
    WhollyFrozen,
]


@pytest.mark.parametrize("block", KINDS, ids=lambda block: block.__name__)
def test_parameter_kind(block, config, checkpointing):
    assert_blocks_exact(block, config, checkpointing)


def test_mixed_dtypes(config):
    testing.assert_exact(lambda: nn.Sequential(MixedDtypes(), MixedDtypes()), normal_batches(), config)


def test_spectral_norm_which_updates_buffers_from_weights(checkpointing):
    # Its buffers must have the weights' dtype, so plain PyTorch must run it in one precision.
    assert_blocks_exact(SpectralNorm, small_chunks("fp32"), checkpointing)


def test_frozen_base_with_adapters_alone_trainable(config):
    def adapted():
        model = Stack([Adapter(), Adapter()])
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    testing.assert_exact(adapted, normal_batches(), config)


def test_frozen_first_layers_whose_inputs_need_no_gradient(config):
    def model():
        return nn.Sequential(WhollyFrozen(), WhollyFrozen(), linear(), WhollyFrozen())

    testing.assert_exact(model, normal_batches(), config)


@pytest.mark.parametrize("first_state", [True, False], ids=["frozen-later", "unfrozen-later"])
def test_a_parameter_changes_between_frozen_and_trainable(first_state, config, checkpointing):
    def build():
        model = Stack([linear(), linear()], checkpointing)
        model.blocks[0].requires_grad_(first_state)
        return model

    def script(trainer, optimizer):
        losses = train(trainer, steps=2)
        trainer.module.blocks[0].requires_grad_(not first_state)
        losses += train(trainer, steps=2, first=2)
        trainer.module.blocks[0].requires_grad_(first_state)
        return losses + train(trainer, steps=2, first=4)

    testing.compare(build, config, script)


def test_everything_frozen_but_one_parameter_at_a_time(config):
    """Block-wise training, as in layer-by-layer fine-tuning."""

    def script(trainer, optimizer):
        losses = []
        for step, (x,) in enumerate(normal_batches(4)):
            for index, block in enumerate(trainer.module.blocks):
                block.requires_grad_(index == step % 2)
            losses.append(update(trainer, optimizer, mean_square(trainer(x))))
        return losses

    testing.compare(lambda: Stack([linear(), linear()]), config, script)


@pytest.mark.parametrize("chunk_bytes", [64, 256, 1024, 65536, "auto"])
def test_any_chunk_size(chunk_bytes, precision):
    config = small_chunks(precision, chunk_bytes=chunk_bytes)
    testing.assert_exact(lambda: Stack([LargerThanAChunk(), Adapter()]), normal_batches(), config)
