"""Update rules of all backends, in place and to other memory, compared bit by bit with an implementation in NumPy.

The reference is in `rule_lists.py` and `ieee.py`. It takes only the hyper-parameters from the rules.
"""

from functools import cache
from itertools import product

import ieee
import implementations
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from kernel_cases import Lists
from rule_lists import LISTS
from sampling import fixed_draws
from torch_without_avx import x86_only

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.schedule_free import ScheduleFreeRule
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.update_rule import Gradient, Rule, Span

pytestmark = pytest.mark.usefixtures("one_thread")

given = fixed_draws(150)

RULES = [
    AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, True, 1),
    AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 3),
    AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, False, 1000),
    AdamRule(0.3, 0.3, 0.5, 1e-8, 0.0, False, 2),
    AdamRule(0.3, 0.3, 0.95, 1e-3, 0.1, True, 2),
    AdamRule(0.3, 0.4, 0.95, 0.0, 0.1, False, 7),
    AdamRule(1e-3, 0.0, 0.0, 1e-8, 0.0, False, 1),
    AdamRule(1e-42, 0.5, 0.95, 1e-41, 1e-40, False, 5),
    Adam8bitRule(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 1),
    Adam8bitRule(1e-3, 0.9, 0.999, 1e-8, 0.0, False, 1000),
    Adam8bitRule(0.3, 0.4, 0.95, 0.0, 0.1, False, 70_000),
    SGDRule(0.1, 0.0, 0.0, 0.0, False, 1),
    SGDRule(0.1, 0.0, 0.0, 0.01, False, 4),
    SGDRule(0.1, 0.9, 0.0, 0.1, False, 1),
    SGDRule(0.1, 0.9, 0.1, 0.0, False, 2),
    SGDRule(0.1, 0.9, 0.1, 0.1, False, 3),
    SGDRule(0.1, 0.9, 0.0, 0.0, True, 1),
    SGDRule(1.0, 0.9, 0.0, 0.1, True, 5),
    LionRule(1e-3, 0.9, 0.99, 0.0),
    LionRule(0.1, 0.3, 0.5, 0.1),
    *(
        ScheduleFreeRule(1e-2, 0.9, 0.95, 1e-8, decay, weight, step)
        for decay, (weight, step) in product((0.0, 0.1), ((1.0, 1), (0.0, 1), (0.5, 2), (0.01, 90)))
    ),
]
SCALES = [(), (1 / 65536, 0.3), (1e-41, 3e38)]


def rule_name(rule):
    return f"{type(rule).__name__}-{rule.mode}"


def double(value):
    return np.asarray(value, dtype=np.float64)


def codes(numel, random):
    return [torch.from_numpy(random.integers(0, 256, numel, dtype=np.uint8)) for _ in range(2)]


def drawn(rule, numel, random, *, grad, param, accumulated=False):
    """Return random numbers, the special ones among them. `grad`: the gradient, or its dtype."""
    grad = ieee.tensor(numel, grad, random) if isinstance(grad, torch.dtype) else grad
    master, summed, *states = (torch.from_numpy(ieee.numbers(numel, random)) for _ in range(2 + len(rule.kinds)))
    if isinstance(rule, Adam8bitRule):
        states = codes(numel, random)
    elif len(states) == 2:  # mostly not negative: the root of a negative variance is NaN
        states[1] = torch.where(torch.from_numpy(random.random(numel) < 0.9), states[1].abs(), states[1])
    chunks = {"grad": grad, "master": master, **dict(zip(rule.kinds, states, strict=True))}
    chunks |= {"accumulated": summed} if accumulated else {}
    chunks |= {"param": torch.empty(numel, dtype=param)} if param != grad.dtype else {}
    return Lists(rule, numel, chunks, dict.fromkeys(chunks, 0))


def expected_bits(lists, scales):
    """Return the expected bits of each list; a gradient beside its parameter, and its sum, are only read."""
    bits = {name: ieee.bits_of(chunk) for name, chunk in lists.chunks.items()}
    grad = ieee.widened(lists.chunks["grad"])
    if "accumulated" in lists.chunks:
        grad = ieee.add(lists.chunks["accumulated"].numpy(), grad)
    for scale in scales:
        grad = ieee.multiply(grad, ieee.rounded(scale))
    names = ("master", *lists.rule.kinds)
    after = LISTS[type(lists.rule)](lists.rule, grad, *(lists.chunks[name].numpy() for name in names), ieee.rounded)
    param = "param" if "param" in lists.chunks else "grad"
    bits |= {name: ieee.stored(values) for name, values in zip(names, after, strict=True)}
    return bits | {param: ieee.stored(after[0], lists.chunks[param].dtype)}


def check(implementation, lists, scales, expected=None):
    """Compare the bits of a backend, in place and in other memory, with the expected ones."""
    expected = expected or expected_bits(lists, scales)
    for elsewhere in (0, 32):
        found = lists.after(implementation, scales, elsewhere=elsewhere)
        for name, bits in expected.items():
            wrong = np.flatnonzero(bits != ieee.bits_of(found[name]))
            assert not wrong.size, (
                f"{lists.rule}: {name} differs in {wrong.size} of {bits.size}, first in {wrong[0]}: "
                f"{bits[wrong[0]]:#x} expected, {ieee.bits_of(found[name])[wrong[0]]:#x} found, of "
                f"{ {kind: chunk[wrong[0]].item() for kind, chunk in lists.chunks.items()} }"
            )


# Backends against the reference


@cache
def hard(rule: Rule, dtype: torch.dtype):
    """Return updates by a rule for a gradient dtype, with their expected bits."""
    random = np.random.default_rng(RULES.index(rule))
    cases, updates = zip([dtype, *ieee.DTYPES, *ieee.DTYPES], product((False, True), SCALES), strict=False), []
    for param, (accumulated, scales) in cases:
        lists = drawn(rule, 1500, random, grad=dtype, param=param, accumulated=accumulated)
        updates.append((lists, scales, expected_bits(lists, scales)))
    return updates


@pytest.mark.pairwise
@pytest.mark.parametrize("implementation", implementations.ALL)
@pytest.mark.parametrize("dtype", ieee.DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_updates_have_the_bits_of_the_written_list(rule, dtype, implementation):
    for update in hard(rule, dtype):
        check(implementation, *update)


def test_the_rules_tried_have_every_mode():
    modes = {(type(rule), rule.mode) for rule in RULES}
    assert modes == {*product([AdamRule, Adam8bitRule], range(3)), *product([SGDRule], range(5)), (LionRule, 0)} | {
        *product([ScheduleFreeRule], range(8))
    }
    heavy = {rule.mode for rule in RULES if type(rule) is AdamRule and rule.beta1 <= 0.5}
    assert heavy == {0, 1, 2}


@pytest.mark.parametrize("implementation", implementations.ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_gradient_of_16_bits(dtype, implementation):
    random = np.random.default_rng(1)
    every = ieee.from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    for rule in (RULES[1], RULES[8], RULES[15], RULES[18]):
        check(implementation, drawn(rule, 1 << 16, random, grad=every, param=dtype), (0.3,))


rates = st.sampled_from([0.0, 1e-42, 1e-8, 1.0, 1e30]) | st.floats(0, 10)
betas = st.sampled_from([0.0, 0.5, 0.5 - 2**-26, 0.5 + 2**-26, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)
decays = st.just(0.0) | st.floats(0, 1)
momenta, few = st.floats(1e-3, 1), st.integers(1, 3)
any_rule = (
    st.builds(AdamRule, rates, betas, betas, rates, decays, st.booleans(), st.integers(1, 1 << 20))
    | st.builds(Adam8bitRule, rates, betas, betas, rates, decays, st.booleans(), st.integers(1, 1 << 40))
    | st.builds(SGDRule, rates, st.just(0.0) | momenta, st.floats(0, 1), decays, st.just(False), few)
    | st.builds(SGDRule, rates, momenta, st.just(0.0), decays, st.just(True), few)
    | st.builds(LionRule, rates, betas, betas, decays)
    | st.builds(ScheduleFreeRule, rates, betas, betas, rates, decays, st.floats(0, 1), st.integers(1, 1 << 20))
)
dtypes = st.sampled_from(ieee.DTYPES)


@pytest.mark.parametrize("implementation", implementations.ALL)
@given(any_rule, dtypes, dtypes, st.booleans(), st.lists(rates, max_size=2).map(tuple), st.integers(0, 1 << 30))
def test_any_hyper_parameters(implementation, rule, dtype, param, accumulated, scales, seed):
    random = np.random.default_rng(seed)
    check(implementation, drawn(rule, 100, random, grad=dtype, param=param, accumulated=accumulated), scales)


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_a_master_of_double_precision_goes_through_the_same_list(rule):
    """NumPy's float64 operations are correctly rounded."""
    random = np.random.default_rng(2)
    grad, master, *states = (random.standard_normal(5000) for _ in range(2 + len(rule.kinds)))
    states = [np.abs(state) for state in states]
    if isinstance(rule, Adam8bitRule):
        states = [state.numpy() for state in codes(5000, random)]
    tensors = [torch.from_numpy(values.copy()) for values in (grad, master, *states)]
    span = Span(tensors[0], Gradient(tensors[0], dtype=torch.float64), tensors[1], tuple(tensors[2:]), rule)
    EagerBackend().update([span], (0.3,))
    after = LISTS[type(rule)](rule, ieee.multiply(grad, double(0.3)), master, *states, double)
    for expected, found in zip((after[0], *after), tensors, strict=True):
        wrong = np.flatnonzero(expected.view(np.uint8) != found.numpy().view(np.uint8))
        assert not wrong.size, f"{wrong.size} of {expected.size} differ, first in {wrong[0]}"


# PyTorch's optimizers


LR = 1e-3
MOST_OF_LR = 5e-4
"""Largest allowed difference from PyTorch after 1,000 steps, in learning rates. Measured: 3.0e-4."""
MOST_ULPS = 40
"""The difference in units in the last place, for parameters of at least 10 learning rates. Measured: 22."""
MOST_OF_CHANGE = 1.5e-6
"""The 2-norm of the difference, relative to the change by 1,000 steps. Measured: 7.6e-7."""


@x86_only
@pytest.mark.parametrize("magnitude", [1.0, 1e-4])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False, "fused": False}], ids=["fused", "plain"])
def test_after_a_thousand_steps_pytorch_is_within_rounding_errors(options, magnitude):
    """With vector instructions PyTorch contracts some operations; the resulting difference stays small."""
    generator = torch.Generator().manual_seed(2)
    start = 0.5 * torch.randn(4109, generator=generator)
    param, master = torch.nn.Parameter(start.clone()), start.clone()
    theirs = torch.optim.AdamW([param], lr=LR, **options)
    states, kernels = (torch.zeros(4109), torch.zeros(4109)), Kernels(CppBackend.find())
    for step in range(1, 1001):
        grad = magnitude * torch.randn(4109, generator=generator)
        param.grad = grad.clone()
        theirs.step()
        rule = AdamRule(LR, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=step)
        kernels.update([Span(grad, Gradient(grad), master, states, rule)], ())
    apart = (param.detach().double() - master.double()).abs()
    assert apart.max() / LR <= MOST_OF_LR
    last_place = torch.nextafter(master.abs(), torch.tensor(torch.inf)).double() - master.abs().double()
    assert (apart / last_place)[master.abs() >= 10 * LR].max() <= MOST_ULPS
    assert apart.norm() / (master - start).double().norm() <= MOST_OF_CHANGE
