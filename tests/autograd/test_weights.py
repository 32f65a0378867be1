"""Ways in which a model accesses its weights."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from .zoo import WIDTH, assert_blocks_exact, linear, weight


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class UsedByParent(nn.Module):
    def __init__(self):
        super().__init__()
        self.never_called = linear()

    def forward(self, x):
        return F.linear(x, self.never_called.weight, self.never_called.bias)


class UsedByParentAndCalled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(torch.tanh(x @ self.linear.weight))


class DetachedAfterUse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = linear(), linear()

    def forward(self, x):
        x = self.other(torch.tanh(self.linear(x)))
        return F.linear(x, self.linear.weight.detach())


class DetachedBeforeUse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = linear(), linear()

    def forward(self, x):
        x = self.other(torch.tanh(F.linear(x, self.linear.weight.detach())))
        return self.linear(x)


class DetachedViewKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = linear(), linear()

    def forward(self, x):
        constant = self.linear.weight.detach().t()
        return self.other(torch.tanh(self.linear(x))) @ constant


class NormalisedWithoutGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight()

    def forward(self, x):
        with torch.no_grad():
            length = self.weight.norm()
        return F.linear(x, self.weight / length)


class TransposedViewKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = weight(), linear()

    def forward(self, x):
        transposed = self.weight.t()
        return torch.tanh(self.other(x)) @ transposed


class ChunkedViewsKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed, self.other = nn.Linear(WIDTH, 3 * WIDTH), linear()

    def forward(self, x):
        query, key, value = self.packed.weight.chunk(3)
        x = torch.tanh(self.other(x))
        return F.linear(x, query) * F.linear(x, key) + F.linear(self.other(x), value)


class ViewPassedToAnotherModule(nn.Module):
    class Multiply(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x, view):
            return torch.tanh(self.linear(x)) @ view

    def __init__(self):
        super().__init__()
        self.weight, self.multiply = weight(), self.Multiply()

    def forward(self, x):
        return self.multiply(x, self.weight.view(WIDTH, WIDTH).t())


class ReturnedByItsModule(nn.Module):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight()

        def forward(self):
            return self.weight

    def __init__(self):
        super().__init__()
        self.holder, self.other = self.Holder(), linear()

    def forward(self, x):
        held = self.holder()
        return F.linear(torch.tanh(self.other(x)), held)


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x):
        chosen = self.table[torch.tensor([0, 2, 2])]
        return x * chosen + self.table[1] - self.table[:2].sum(0)


class CastToFloat(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight()

    def forward(self, x):
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class InEinsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight()

    def forward(self, x):
        return torch.einsum("bsi,oi->bso", x, self.weight)


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x):
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)[:, 1:] * self.token


class FunctionalCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = linear(), weight()

    def forward(self, x):
        return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.scale}, (x,))


class InParameterList(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([weight() for _ in range(3)])

    def forward(self, x):
        for each in self.weights:
            x = torch.tanh(F.linear(x, each))
        return x


class InParameterDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({"up": weight(), "down": weight()})

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weights["up"])), self.weights["down"])


class ReadsMetadata(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = weight(), linear()

    def forward(self, x):
        x = self.other(x)
        assert self.weight.shape == (WIDTH, WIDTH) and self.weight.size(0) == len(self.weight) == WIDTH
        assert self.weight.stride() == (WIDTH, 1) and self.weight.is_contiguous() and self.weight.is_leaf
        assert self.weight.numel() == WIDTH**2 and self.weight.dim() == self.weight.ndim == 2
        assert self.weight.device == x.device and self.weight.requires_grad
        return F.linear(x.to(self.weight.dtype).view(-1, self.weight.shape[1]), self.weight).view_as(x)


USES = [
    CalledTwice,
    UsedByParent,
    UsedByParentAndCalled,
    DetachedAfterUse,
    DetachedBeforeUse,
    DetachedViewKept,
    NormalisedWithoutGrad,
    TransposedViewKept,
    ChunkedViewsKept,
    ViewPassedToAnotherModule,
    ReturnedByItsModule,
    Indexed,
    CastToFloat,
    InEinsum,
    Expanded,
    FunctionalCall,
    InParameterList,
    InParameterDict,
    ReadsMetadata,
]


@pytest.mark.parametrize("block", USES, ids=lambda block: block.__name__)
def test_a_weight_in_use(block, config, checkpointing):
    assert_blocks_exact(block, config, checkpointing)
