"""`torch.optim` bit for bit, where PyTorch contracts nothing: a process of its own, run by `test_own_process.py`."""

import platform

import pytest
import torch

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar.optim import Muon
from patrickstar.testing import assert_same_bits

x86_only = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason=f"on {platform.machine()} PyTorch contracts multiplications and additions into one in its plainest code too",
)
pytestmark = [pytest.mark.usefixtures("one_thread"), x86_only]

STEPS = 4
SHAPES = [(1,), (7,), (33,), (512,), (40, 25), (3, 5, 411)]
"""Whole vectors of any width, and not."""


def test_pytorch_runs_without_vector_instructions():
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def drawn(shapes, generator):
    """Numbers of all magnitudes, some of them zeros of either sign."""
    normal = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for shape in shapes]
    values = [one * torch.exp(4 * other) for one, other in normal]
    return [value * (torch.rand(value.shape, generator=generator) < 0.95) for value in values]


def check(kind, options, rule_of, signed_zeros=True):
    """Steps by torch's class, and by the rule; masters and states after each."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(value) for value in drawn(SHAPES, generator)]
    masters = [param.detach().clone().flatten() for param in params]
    optimizer = kind(params, **options)
    kinds = rule_of(1).kinds
    states = [tuple(torch.zeros_like(master) for _ in kinds) for master in masters]
    kernels = Kernels(CppBackend.find())
    for step in range(1, STEPS + 1):
        grads = [grad if signed_zeros else grad + 0.0 for grad in drawn(SHAPES, generator)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        flat = [grad.flatten() for grad in grads]
        spans = [Span(g, Gradient(g), m, s, rule_of(step)) for g, m, s in zip(flat, masters, states, strict=True)]
        kernels.update(spans, ())
        for param, master, state in zip(params, masters, states, strict=True):
            theirs = [param.detach(), *(optimizer.state[param][name] for name in kinds)]
            ours = [values.view(param.shape) for values in (master, *state)]
            assert_same_bits(theirs, ours, f"step {step} of {options}, shape {tuple(param.shape)}")


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize("lr", [1e-3, 0.3])
def test_adam(lr, betas, eps, weight_decay, kind):
    def rule(step):
        return AdamRule(lr, *betas, eps, weight_decay, kind is torch.optim.AdamW, step)

    # Where there is no first momentum, PyTorch's own average of negative zeros is another one at the end of a tensor.
    options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    check(kind, options, rule, signed_zeros=betas[0] > 0)


MOMENTA = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.1, False), (0.9, 0.0, True)]


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-3, 0.3])
@pytest.mark.parametrize("momentum", MOMENTA)
def test_sgd(momentum, lr, weight_decay):
    names = dict(zip(("momentum", "dampening", "nesterov"), momentum, strict=True))

    def rule(step):
        return SGDRule(lr=lr, weight_decay=weight_decay, step=step, **names)

    check(torch.optim.SGD, dict(lr=lr, weight_decay=weight_decay, foreach=False, **names), rule)


@pytest.mark.pairwise
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(16, 16), (24, 64), (64, 24), (1, 8)])
def test_muon(shape, adjust_lr, nesterov):
    options = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr}
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape, generator=generator))
    master, buffer = param.detach().clone(), torch.zeros(shape)
    optimizer, own = torch.optim.Muon([param], **options), Muon(**options)
    for step in range(1, STEPS + 1):
        grad = torch.randn(shape, generator=generator)
        param.grad = grad.clone()
        optimizer.step()
        rule = own.rule(own.defaults(), step, {}).for_param(shape, master.stride(), master.device)
        rule.apply(master.view(-1), grad.view(-1), [buffer.view(-1)])
        theirs = [param.detach(), optimizer.state[param]["momentum_buffer"]]
        assert_same_bits(theirs, [master, buffer], f"step {step} of {options}, shape {shape}")
