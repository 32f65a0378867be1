"""Choice of the backend, its workspace, and identical bits whichever backend is chosen."""

import warnings
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar
from unittest.mock import Mock

import implementations
import pytest
import torch
from cpp_backend_cases import ADAM, LION
from cpp_backend_cases import MOMENTUM as SGD
from kernel_cases import SplitLists

from patrickstar._kernels import dispatch
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.eager_backend import PAGE_NUMEL, EagerBackend
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.torch_optim_adapter import Instances, TorchOptimRule
from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar.testing import assert_same_bits

ITEMS = Rule.workspace_items

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM_8BIT = Adam8bitRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=False, step=3)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class SignRule(Rule):
    """Rule of a user."""

    lr: float

    @property
    def kinds(self):
        return ()

    def apply(self, master, grad, states):
        master.add_(grad.sign_().mul_(-self.lr))


@dataclass(frozen=True)
class WholeRule(SignRule):
    """Rule that needs the whole parameter."""

    by_pages: ClassVar = False


def span(rule, numel=40, *, grad=torch.bfloat16, param=None, master=torch.float32, device="cpu", seed=0):
    """Return a span of random numbers."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(dtype):
        return torch.randn(numel, generator=generator).to(dtype=dtype, device=device)

    last = drawn(grad)
    to = last if param is None else drawn(param)
    states = tuple(drawn(torch.uint8 if rule is ADAM_8BIT else master).abs() for _ in rule.kinds)
    return Span(to, Gradient(last, dtype=master), drawn(master), states, rule)


def tensors(one):
    return [one.param, one.master, *one.states]


@pytest.fixture
def kernels():
    if implementations.native is None:
        pytest.skip(implementations.NOT_BUILT)
    return Kernels(implementations.native)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", [ADAM, SGD, LION], ids=lambda rule: type(rule).__name__)
def test_the_c_plus_plus_kernel_takes_its_rules_over_masters_of_single_precision(rule, dtype, kernels):
    for param in (None, torch.bfloat16, torch.float16, torch.float32):
        one = span(rule, grad=dtype, param=param)
        assert kernels.for_update(one) is kernels.cpp
        assert kernels.for_grad_stats(one.grad) is kernels.cpp


OTHERS = {
    "a user's rule": span(SignRule(0.1)),
    "a class of torch": span(TorchOptimRule(Instances(torch.optim.Adagrad, {}), {}, (), {}, 1)),
    "double precision": span(ADAM, grad=torch.float64, master=torch.float64),
    "a master of double precision": span(ADAM, master=torch.float64),
    "a parameter of double precision": span(ADAM, param=torch.float64),
    "a gradient of double precision": span(ADAM, grad=torch.float64),
    "another device": span(ADAM, device="meta"),
    "a parameter elsewhere": replace(span(ADAM), param=torch.empty(40, device="meta")),
    "a master elsewhere": replace(span(ADAM), master=torch.empty(40, device="meta")),
}


@pytest.mark.parametrize("one", OTHERS.values(), ids=OTHERS)
def test_the_rest_is_left_to_pytorchs_operators(one, kernels):
    assert kernels.for_update(one) is kernels.eager


def test_a_gradient_of_double_precision_is_surveyed_by_pytorchs_operators(kernels):
    assert kernels.for_grad_stats(span(ADAM, grad=torch.float64).grad) is kernels.eager
    assert kernels.for_grad_stats(span(ADAM, master=torch.float64).grad) is kernels.eager
    assert kernels.for_grad_stats(span(SignRule(0.1)).grad) is kernels.cpp  # whatever the rule is


def mixed():
    """Return spans for several backends in alternating order."""
    rules = [ADAM, SignRule(0.1), LION, SGD, WholeRule(0.2), ADAM, SignRule(0.3)]
    spans = [span(rule, 30 + 7 * seed, seed=seed) for seed, rule in enumerate(rules)]
    doubles = [span(ADAM, 33, grad=torch.float64, master=torch.float64, seed=9), span(SGD, 5, master=torch.float64)]
    return [*spans, *doubles, span(ADAM, PAGE_NUMEL + 3, grad=torch.float16)]


def test_with_or_without_the_bits_are_the_same(kernels):
    found = []
    for each in (kernels, Kernels(None)):
        spans = mixed()
        grad_stats = each.grad_stats([one.grad for one in spans], (0.3,))
        each.update(spans, (0.3, 0.5))
        found.append((grad_stats, spans))
    (one_stats, one), (other_stats, other) = found
    assert one_stats == other_stats
    assert len(one_stats.squares) == len(one)
    for ours, theirs in zip(one, other, strict=True):
        assert_same_bits(tensors(theirs), tensors(ours), str(ours.rule))


def test_surveys_by_several_keep_the_order_of_gradients(kernels):
    def grad(value, dtype=torch.float32):
        return Gradient(torch.tensor([value], dtype=dtype), dtype=dtype)

    gradients = [grad(1.0), grad(2.0, torch.float64), grad(3.0), grad(float("inf"), torch.float64), grad(5.0)]
    assert kernels.grad_stats(gradients, ()) == GradStats((1.0, 4.0, 9.0, float("inf"), 25.0), 1)
    assert kernels.grad_stats([], ()) == GradStats()
    kernels.update([], ())


def test_what_the_c_plus_plus_kernel_began_is_waited_for_later(kernels):
    rules = (ADAM, SignRule(0.1), LION)
    one, other = ([span(rule, 1 << 19, seed=seed) for seed, rule in enumerate(rules)] for _ in range(2))
    running = kernels.start(one, (0.5,))
    assert len(running) == 2
    for each in running:
        each.wait()
    assert Kernels(None).start(other, (0.5,)) == []
    for ours, theirs in zip(one, other, strict=True):
        assert_same_bits(tensors(theirs), tensors(ours), str(ours.rule))


def test_updating_takes_room_only_where_pytorchs_operators_do_it(kernels):
    for rule in (ADAM, SGD, LION):
        assert kernels.workspace_bytes(rule, CPU, torch.float32, 1 << 30) == 0
        assert kernels.workspace_bytes(rule, CPU, torch.float64, 10) == 10 * ITEMS * 8
    assert kernels.workspace_bytes(ADAM, CUDA, torch.float32, 10) == 10 * ITEMS * 4
    assert kernels.workspace_bytes(SignRule(0.1), CPU, torch.float32, 10) == 10 * ITEMS * 4


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.float64, 8)])
def test_pytorchs_operators_take_room_for_a_page_or_for_all(dtype, itemsize):
    kernels = Kernels(None)
    for numel in (0, 1, 1000, PAGE_NUMEL, PAGE_NUMEL + 1, 1 << 30):
        page = min(numel, PAGE_NUMEL)
        assert kernels.workspace_bytes(ADAM, CPU, dtype, numel) == page * ITEMS * itemsize
        assert kernels.workspace_bytes(WholeRule(0.1), CPU, dtype, numel) == numel * ITEMS * itemsize


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the peak bytes of the live storages that operators use besides those of a span."""

    def __init__(self, one):
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in (*tensors(one), one.grad.latest)}
        self.alive, self.peak_bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.given:
                self.alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: (ref, nbytes) for key, (ref, nbytes) in self.alive.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self.alive.values()))
        return out


def _tensors(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


UPDATES = [ADAM, replace(ADAM, decoupled=False), replace(SGD, nesterov=True), LION, ADAM_8BIT]


@pytest.mark.parametrize("rule", UPDATES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_updating_takes_no_more_room_than_was_said(rule, dtype):
    one = span(rule, 3 * PAGE_NUMEL, master=dtype)
    with Allocations(one) as allocations:
        EagerBackend().update([one], (0.3, 0.5))
    announced = Kernels(None).workspace_bytes(rule, CPU, dtype, one.numel)
    assert PAGE_NUMEL < allocations.peak_bytes <= announced


def test_updating_split_masters_takes_no_more_room_than_was_said():
    one = SplitLists.drawn(ADAM, 3 * PAGE_NUMEL).split().span()
    with Allocations(one) as allocations:
        EagerBackend().update([one], (0.3, 0.5))
    announced = Kernels(None).workspace_bytes(ADAM, CPU, torch.float32, one.numel, splits=True)
    assert PAGE_NUMEL < allocations.peak_bytes <= announced


@pytest.fixture
def none_installed(monkeypatch):
    """Simulate an installation without kernels, before any warning."""
    for kind in (CppBackend, TritonBackend):
        monkeypatch.setattr(kind, "load", Mock(side_effect=Unavailable("it was not built")))
    dispatch._warn_missing.cache_clear()
    yield
    dispatch._warn_missing.cache_clear()


def test_an_installation_without_a_kernel_says_so_once(none_installed):
    with pytest.warns(UserWarning) as caught:
        found = [Kernels.best(CPU), Kernels.best(CPU), Kernels.best(CUDA), Kernels.best(CUDA)]
    messages = [str(one.message) for one in caught]
    assert ["C++ kernel" in message for message in messages] == [True, False]
    assert ["Triton kernel" in message for message in messages] == [False, True]
    assert all("same bits" in message and "\n" not in message for message in messages)
    for kernels, rule in product(found, (ADAM, SGD, LION, SignRule(0.1))):
        assert kernels.cpp is None and kernels.triton is None
        assert kernels.for_update(span(rule)) is kernels.for_grad_stats(span(rule).grad) is kernels.eager


def test_an_installation_with_the_kernel_says_nothing(kernels):
    dispatch._warn_missing.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = Kernels.best(CPU)
    assert best.cpp is not None and best.triton is None
