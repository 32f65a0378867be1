"""The C++ kernel: any size, any start, any cut, any number of threads; what it shares with the rest of the process."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import implementations
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar.testing import assert_same_bits

pytestmark = [pytest.mark.usefixtures("one_thread"), implementations.needs_native]

quick = settings(derandomize=True, deadline=None, max_examples=60)

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ADAM = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
MOMENTUM = SGDRule(0.1, 0.9, 0.0, 0.01, nesterov=False, step=2)
PLAIN = SGDRule(0.1, 0.0, 0.0, 0.0, nesterov=False, step=1)
LION = LionRule(1e-3, 0.9, 0.99, 0.1)
RULES = [ADAM, MOMENTUM, PLAIN, LION]

STRIP, BLOCK, PAGE = 512, 4096, 1 << 20
"""The C++ code's units, in elements: of its inner loops, of its sums, of a thread's work."""
SCALES = (0.3, 0.5)
AROUND = 7.0
"""What lies in memory before and after what is updated."""


@dataclass(frozen=True)
class Lists:
    """A parameter in its lists: the chunk of each, and the element it starts at there."""

    rule: Rule
    numel: int
    chunks: dict[str, torch.Tensor]
    firsts: dict[str, int]

    @classmethod
    def drawn(cls, rule, numel, *, grad=BF16, param=None, earlier=False, firsts=(0,), seed=0):
        """Random numbers. `param`: None to write over the gradient, or a dtype. `firsts`: repeated as needed."""
        generator = torch.Generator().manual_seed(seed)
        dtypes = {"grad": grad, "param": param, "earlier": FP32 if earlier else None, "master": FP32}
        dtypes |= dict.fromkeys(rule.kinds, FP32)
        chunks, starts = {}, {}
        for number, (name, dtype) in enumerate(dtypes.items()):
            if dtype is not None:
                first = starts[name] = firsts[number % len(firsts)]
                values = torch.randn(numel, generator=generator)
                chunks[name] = torch.full((first + numel + 40,), AROUND, dtype=dtype)
                chunks[name][first : first + numel] = values.abs() if name == "exp_avg_sq" else values
        return cls(rule, numel, chunks, starts)

    def view(self, name):
        """The parameter's part of a list; None if there is no such list."""
        first = self.firsts.get(name)
        return None if first is None else self.chunks[name][first : first + self.numel]

    def span(self, rule=None):
        """What is handed to an implementation."""
        grad, param = self.view("grad"), self.view("param")
        states = tuple(self.view(kind) for kind in self.rule.kinds)
        gradient = Gradient(grad, self.view("earlier"))
        return Span(grad if param is None else param, gradient, self.view("master"), states, rule or self.rule)

    def copy(self):
        """The same numbers in memory of their own."""
        return replace(self, chunks={name: chunk.clone() for name, chunk in self.chunks.items()})

    def after(self, implementation, scales=SCALES, shard_bounds=()):
        """The chunks after an update by one call, cut into spans at some elements."""
        lists = self.copy()
        span = lists.span()
        spans = [span.page(slice(*ends)) for ends in pairwise((0, *sorted(shard_bounds), self.numel))]
        implementation.update(spans, scales)
        return lists.chunks

    def check(self, implementation, scales=SCALES, shard_bounds=()):
        """Against the written list, in one piece; memory around is compared too."""
        expected, found = self.after(EagerBackend(), scales), self.after(implementation, scales, shard_bounds)
        assert_same_bits(
            expected, found, f"{self.rule} over {self.numel} elements from {self.firsts}, cut at {shard_bounds}"
        )


# Sizes and places

SIZES = [0, 1, 2, 7, 15, 31, 33, STRIP - 1, STRIP, STRIP + 1, 3 * STRIP + 5, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]


@pytest.mark.parametrize("variant", implementations.NATIVE)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_any_size(rule, variant):
    for number, numel in enumerate(SIZES):
        grad, earlier = DTYPES[number % 3], number % 2 == 0
        Lists.drawn(rule, numel, grad=grad, earlier=earlier).check(CppBackend.find(variant, 2))


@pytest.mark.parametrize("numel", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + STRIP + 1])
@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_sizes_about_a_page(variant, numel):
    Lists.drawn(ADAM, numel).check(CppBackend.find(variant, 2))


@pytest.mark.parametrize("variant", implementations.NATIVE)
@quick
@given(
    st.sampled_from(RULES),
    st.integers(0, 1200),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.booleans(),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
)
def test_any_start(variant, rule, numel, grad, param, earlier, firsts):
    """Every list starts at an element of its own, and what lies around is not touched."""
    lists = Lists.drawn(rule, numel, grad=grad, param=param, earlier=earlier, firsts=firsts)
    lists.check(CppBackend.find(variant, 2))
    chunks = lists.after(CppBackend.find(variant, 2))
    for name, first in lists.firsts.items():
        assert (chunks[name][:first] == AROUND).all() and (chunks[name][first + numel :] == AROUND).all()


@pytest.mark.parametrize("variant", implementations.NATIVE)
@pytest.mark.parametrize("param", DTYPES, ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_a_parameter_apart_from_its_gradient_leaves_that_as_it_was(grad, param, variant):
    lists = Lists.drawn(ADAM, 1000, grad=grad, param=param, earlier=True, firsts=(5, 2))
    lists.check(CppBackend.find(variant, 1))
    chunks = lists.after(CppBackend.find(variant, 1))
    for name in ("grad", "earlier"):
        assert_same_bits([lists.chunks[name]], [chunks[name]], name)
    if grad == param:
        in_place = replace(lists, firsts={name: first for name, first in lists.firsts.items() if name != "param"})
        assert_same_bits(
            [in_place.after(CppBackend.find(variant, 1))["grad"][5:1005]],
            [chunks["param"][2:1002]],
            "in place and apart",
        )


def test_only_what_the_rule_has_is_written():
    for rule in RULES:
        lists = Lists.drawn(rule, 700, param=FP16, earlier=True)
        after = lists.after(CppBackend.find())
        changed = {name for name in after if not torch.equal(after[name], lists.chunks[name])}
        assert changed == {"param", "master", *rule.kinds}


# Threads and cuts


@cache
def five_pages():
    """Lists that several threads share, and what an update makes of them."""
    lists = Lists.drawn(ADAM, 4 * PAGE + 77)
    return lists, lists.after(EagerBackend())


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_any_number_of_threads(variant, threads):
    lists, expected = five_pages()
    assert_same_bits(expected, lists.after(CppBackend.find(variant, threads)), f"{threads} threads")


@pytest.mark.parametrize("variant", implementations.NATIVE)
@quick
@given(
    st.sampled_from(RULES),
    st.integers(1, 3000).flatmap(lambda numel: st.tuples(st.just(numel), st.lists(st.integers(0, numel), max_size=5))),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
)
def test_a_cut_anywhere_changes_nothing(variant, rule, size_and_cuts, grad, threads):
    numel, shard_bounds = size_and_cuts
    Lists.drawn(rule, numel, grad=grad, earlier=True, firsts=(1, 2, 3)).check(
        CppBackend.find(variant, threads), shard_bounds=shard_bounds
    )


@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_cuts_about_a_page(variant):
    lists = Lists.drawn(LION, PAGE + 900, grad=FP16)
    for shard_bounds in ([1], [PAGE - 1], [PAGE], [PAGE + 1], [33, PAGE // 2 + 1, PAGE + 899]):
        lists.check(CppBackend.find(variant, 2), shard_bounds=shard_bounds)


@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_spans_of_one_call_have_their_own_sizes_dtypes_and_hyper_parameters(variant):
    rules = [replace(ADAM, lr=10.0**-n, step=n + 1, weight_decay=0.1 * (n % 2), decoupled=n % 3 > 0) for n in range(12)]
    rules += [replace(ADAM, beta1=0.3), MOMENTUM, replace(MOMENTUM, nesterov=True), PLAIN, LION, ADAM, ADAM]
    for scales in ((), (0.3,), SCALES):
        both = [
            [
                Lists.drawn(rule, 37 * n, grad=DTYPES[n % 3], param=(None, *DTYPES)[n % 4], earlier=n % 2 == 0, seed=n)
                for n, rule in enumerate(rules)
            ]
            for _ in range(2)
        ]
        for lists, implementation in zip(both, (EagerBackend(), CppBackend.find(variant, 3)), strict=True):
            implementation.update([one.span() for one in lists], scales)
        for one, other in zip(*both, strict=True):
            assert_same_bits(one.chunks, other.chunks, str(one.rule))


@pytest.mark.parametrize("spans", [[], [Lists.drawn(ADAM, 0).span()]], ids=["no span", "an empty span"])
def test_nothing_to_do(spans):
    CppBackend.find().update(spans, ())
    assert CppBackend.find().grad_stats([span.grad for span in spans], ()).squares == (0.0,) * len(spans)


# Variants


def test_an_unknown_variant_is_refused_with_those_that_run():
    kernel, lists = CppBackend.find("avx1024"), Lists.drawn(ADAM, 10)
    for refused in (
        lambda: kernel.update([lists.span()], ()),
        lambda: kernel.start([lists.span()], ()),
        lambda: kernel.grad_stats([lists.span().grad], ()),
    ):
        with pytest.raises(ValueError) as caught:
            refused()
        assert str(kernel.variants()) in str(caught.value)
        assert "avx1024" in str(caught.value)
    assert_same_bits(lists.chunks, Lists.drawn(ADAM, 10).chunks, "lists after a refusal")


def test_the_fastest_variant_is_taken():
    native = CppBackend.find()
    order = [variant for variant in implementations.VARIANTS if variant in native.variants()]
    assert native.variants() == order
    assert order[-1] == "baseline"
    assert native.name == f"C++ ({order[0]})"
    assert CppBackend.find("baseline").name == "C++ (baseline)"


# What a thread may have set


@pytest.fixture
def flushed():
    """Denormal numbers are flushed to zero in this thread, once it is called."""

    def flush():
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine can't flush denormal numbers")
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0, "they are not flushed, so this test shows nothing"

    yield flush
    torch.set_flush_denormal(False)


def denormal(numel, rule):
    """Lists in which most numbers are denormal, and become so."""
    lists = Lists.drawn(rule, numel, grad=FP32, param=FP16)
    for name, chunk in lists.chunks.items():
        chunk *= 1e-6 if name == "param" else 1e-39
    return lists


@pytest.mark.parametrize("numel", [100, PAGE + 100], ids=["one page", "several"])
@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_flushing_denormal_numbers_in_the_calling_thread_changes_nothing(variant, numel, flushed):
    kernel, lists = CppBackend.find(variant, 2), denormal(numel, replace(MOMENTUM, weight_decay=0.3))
    grads = [lists.span().grad, Gradient(torch.full((BLOCK + 5,), 1e-41))]
    expected, grad_stats = lists.after(EagerBackend()), EagerBackend().grad_stats(grads, SCALES)
    found = lists.copy()
    spans = [found.span()]
    flushed()
    kernel.update(spans, SCALES)
    found_survey = kernel.grad_stats(grads, SCALES)
    torch.set_flush_denormal(False)
    assert_same_bits(expected, found.chunks, "with denormals flushed outside")
    assert found_survey == grad_stats
    assert min(grad_stats.squares) > 0


@pytest.mark.parametrize(
    ("rule", "scales"),
    [(replace(PLAIN, lr=1e-40), (1e30,)), (PLAIN, (1e-40, 1e30))],
    ids=["a hyper-parameter", "a scale"],
)
def test_flushing_does_not_reach_what_is_denormal_among_scalars(rule, scales, flushed):
    """They are rounded to float32 in the calling thread."""
    lists = Lists.drawn(rule, 100, grad=FP32)
    lists.chunks["master"].zero_()
    expected, found = lists.after(EagerBackend(), scales), lists.copy()
    assert expected["master"].count_nonzero() == 100
    spans = [found.span()]
    flushed()
    CppBackend.find().update(spans, scales)
    torch.set_flush_denormal(False)
    assert_same_bits(expected, found.chunks, "with denormals flushed outside")


STARTED_WHILE_FLUSHED = """
kernel, lists = Native.find(None, 2), denormal(3 * PAGE, PLAIN)
expected, found = lists.after(Listed()), lists.copy()
spans = [found.span()]
assert kernel.pool_size == 0
flushes = torch.set_flush_denormal(True)
kernel.update(spans, SCALES)
torch.set_flush_denormal(False)
assert kernel.pool_size == 2
assert_same_bits(expected, found.chunks, f"threads started while denormals were flushed: {flushes}")
"""


def test_threads_started_while_denormal_numbers_are_flushed_do_not_flush_them():
    in_a_process(STARTED_WHILE_FLUSHED)


def test_the_callers_own_setting_stays(flushed):
    flushed()
    for numel in (10, PAGE + 10):
        CppBackend.find().update([denormal(numel, PLAIN).span()], ())
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0
    torch.set_flush_denormal(False)
    CppBackend.find().update([denormal(10, PLAIN).span()], ())
    assert float(torch.tensor([1e-40]) * 1.0) != 0.0


# The pool of threads


def test_an_update_may_be_finished_later():
    """Several may be on their way at once; each keeps what it works on."""
    kernel = CppBackend.find(None, 2)
    all_lists = [Lists.drawn(ADAM, numel, seed=numel) for numel in (10, PAGE + 5, 3 * PAGE)]
    copies = [lists.copy() for lists in all_lists]
    running = [kernel.start([lists.span()], SCALES) for lists in copies]
    for one in reversed(running):
        one.finish()
        one.finish()  # once more does no harm
    for lists, copy in zip(all_lists, copies, strict=True):
        assert_same_bits(lists.after(EagerBackend()), copy.chunks, "finished later")


def test_an_update_that_nobody_finishes_is_waited_for():
    """Else its memory might be freed, or read, while threads still write to it."""
    lists = Lists.drawn(ADAM, 3 * PAGE)
    found = lists.copy()
    running = CppBackend.find(None, 1).start([found.span()], SCALES)
    del running
    assert_same_bits(lists.after(EagerBackend()), found.chunks, "dropped")


def test_other_python_threads_run_during_an_update():
    ticks, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(1e-4)  # so that between two ticks the main thread has the GIL, and keeps it if it can

    def ticks_during(calls):
        lists = Lists.drawn(PLAIN, PAGE)
        spans = [lists.span()] * calls  # one after the other, on one thread
        before = ticks[0]
        CppBackend.find("baseline", 1).update(spans, ())
        return ticks[0] - before

    counter = threading.Thread(target=count)
    counter.start()
    try:
        calls = 64
        while ticks_during(calls) < 10 and calls < 1 << 14:
            calls *= 2
        assert calls < 1 << 14, "an update of seconds, and nothing else ran"
    finally:
        stop.set()
        counter.join()


def in_a_process(program):
    """Run a program that knows this module's names, where the pool has no threads yet."""
    preamble = f"import sys\nsys.path[:0] = {sys.path!r}\nfrom test_native import *\ntorch.set_num_threads(1)\n"
    result = subprocess.run([sys.executable, "-c", preamble + program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


TWO_AT_ONCE = """
kernel = Native.find(None, 2)
assert kernel.pool_size == 0, kernel.pool_size
lists = [Lists.drawn(ADAM, 3 * PAGE + 5, seed=seed) for seed in range(2)]
expected = [one.after(Listed()) for one in lists]
start, wrong = threading.Barrier(2), []

def work(number):
    start.wait()
    for _ in range(6):
        try:
            assert_same_bits(expected[number], lists[number].after(kernel), f"thread {number}")
        except AssertionError as error:
            wrong.append(error)

threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
assert kernel.pool_size == 2, kernel.pool_size
Native.find(None, 3).update([lists[0].copy().span()], ())
assert kernel.pool_size == 3, kernel.pool_size
kernel.survey([lists[0].span().grad], ())
assert kernel.pool_size == 3, kernel.pool_size
"""


def test_two_python_threads_share_the_pool():
    in_a_process(TWO_AT_ONCE)


AFTER_FORK = """
kernel = Native.find(None, 2)
lists = Lists.drawn(ADAM, 2 * PAGE + 5)
expected = lists.after(Listed())
assert_same_bits(expected, lists.after(kernel), "before the fork")
child = os.fork()
if child == 0:
    try:
        assert kernel.pool_size == 0, kernel.pool_size
        assert_same_bits(expected, lists.after(kernel), "the child")
        assert kernel.pool_size == 2, kernel.pool_size
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kernel.pool_size == 2, kernel.pool_size
assert_same_bits(expected, lists.after(kernel), "the parent afterwards")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork_parent_and_child_can_both_update():
    in_a_process(AFTER_FORK)


# The longer run


@pytest.mark.slow
@pytest.mark.parametrize("variant", implementations.NATIVE)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.sampled_from(RULES),
    st.integers(PAGE - 5000, 3 * PAGE + 5000),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
    st.integers(1, 4),
    st.data(),
)
def test_pages_in_any_number(variant, rule, numel, grad, param, firsts, threads, data):
    shard_bounds = data.draw(st.lists(st.integers(0, numel), max_size=4))
    lists = Lists.drawn(rule, numel, grad=grad, param=param, firsts=firsts)
    lists.check(CppBackend.find(variant, threads), shard_bounds=shard_bounds)
