"""In-place operators on inputs and outputs of modules."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from patrickstar import testing

from .zoo import WIDTH, assert_blocks_exact, linear, normal_batches


class ActivationOnOutput(nn.Module):
    """Linear on 3-D input, which returns a view."""

    def __init__(self):
        super().__init__()
        self.linear, self.after = linear(), linear()

    def forward(self, x):
        x = F.relu_(self.linear(x).add_(1))
        return self.after(x)


class ActivationOnFlatOutput(ActivationOnOutput):
    """Linear on 2-D input, which returns no view."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class ActivationModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.SiLU(inplace=True))

    def forward(self, x):
        return self.layers(x)


class ResidualAddedInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        hidden = self.first(x)
        hidden += self.second(torch.tanh(x))
        return hidden


class OutputIsAView(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return self.linear(x).view(-1, WIDTH)

    def __init__(self):
        super().__init__()
        self.inner, self.after = self.Inner(), linear()

    def forward(self, x):
        flat = self.inner(x)
        flat.mul_(2).relu_()
        return self.after(flat).view_as(x)


class OutputIsItsInput(nn.Module):
    """Dropout in eval mode and identities, which return their input tensor itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.identity, self.after = linear(), nn.Identity(), linear()

    def forward(self, x):
        hidden = self.linear(x)
        same = self.identity(hidden)
        same.add_(1)
        return self.after(hidden) + same


class OutputIsAViewOfItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.flatten, self.after = linear(), nn.Flatten(0, 1), linear()

    def forward(self, x):
        hidden = self.linear(x)
        self.flatten(hidden).mul_(2)
        return self.after(hidden)


class WritesIntoItsInput(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            x.mul_(2)
            return self.linear(x)

    def __init__(self):
        super().__init__()
        self.before, self.inner = linear(), self.Inner()

    def forward(self, x):
        hidden = self.before(x)
        return self.inner(hidden) + hidden


class WritesIntoItsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.linear(x)
        with torch.no_grad():
            self.running.lerp_(x.mean((0, 1)).to(self.running.dtype), 0.1)
        return x + self.running.to(x.dtype).clone()


BLOCKS = [
    ActivationOnOutput,
    ActivationOnFlatOutput,
    ActivationModule,
    ResidualAddedInPlace,
    OutputIsAView,
    OutputIsItsInput,
    OutputIsAViewOfItsInput,
    WritesIntoItsInput,
    WritesIntoItsBuffer,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_writing_in_place(block, config, checkpointing):
    assert_blocks_exact(block, config, checkpointing)


def test_in_place_activation_on_the_models_output(config):
    def loss_of(output, batch):
        return F.relu_(output).float().pow(2).mean()

    testing.assert_exact(lambda: nn.Sequential(linear(), linear()), normal_batches(), config, loss_fn=loss_of)
