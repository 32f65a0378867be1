"""The dry run names the module that runs, in forwards and backwards."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar._dry_run.module_trace import ModuleTrace
from patrickstar.errors import BudgetError


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trace, in_backward, parameter):
        ctx.refuse = in_backward, trace, parameter
        if not in_backward:
            refuse(trace, parameter)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        in_backward, trace, parameter = ctx.refuse
        if in_backward:
            refuse(trace, parameter)
        return grad, None, None, None


def refuse(trace, parameter):
    trace.note_operator(10)
    error = BudgetError("too small")
    error.parameter = parameter
    raise error


class Inner(nn.Module):
    refuses: tuple | None = None

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(2, 2)

    def forward(self, x):
        x = self.proj(x)
        return x if self.refuses is None else Refuses.apply(x, *self.refuses)


class Outer(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.sum()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("in_backward", "parameter", "expected"),
    [
        (False, None, "module 'blocks.1' (Inner)"),
        (True, None, "the backward of module 'blocks.1' (Inner)"),
        (True, "blocks.0.proj.weight", "the backward of module 'blocks.0.proj' (Linear)"),
    ],
)
def test_the_module_of_a_refusal(checkpointed, in_backward, parameter, expected):
    model = Outer(checkpointed)
    trace = ModuleTrace(model)
    model.blocks[1].refuses = (trace, in_backward, parameter)
    for _ in range(2):  # a refused step leaves nothing behind
        with pytest.raises(BudgetError) as refused, trace.watch():
            model(torch.ones(1, 2, requires_grad=True)).backward()
        assert refused.value.module == expected
        assert trace.peak_module == expected or parameter is not None
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_the_peak_is_that_of_the_last_step():
    model = Outer(False)
    trace = ModuleTrace(model)
    hooks = []
    for block, nbytes in zip(model.blocks, (5, 9, 9), strict=True):
        hooks.append(block.register_forward_pre_hook(lambda *_, nbytes=nbytes: trace.note_operator(nbytes)))
    with trace.watch():
        model(torch.ones(1, 2))
    assert trace.peak_module == "module 'blocks.1' (Inner)"
    for hook in hooks:
        hook.remove()
    with trace.watch():
        model(torch.ones(1, 2))
    assert trace.peak_module is None
