"""C++ backend: sizes, offsets, span boundaries, numbers of threads and variants give the bits of the eager backend."""

from dataclasses import replace

import implementations
import pytest
from cpp_backend_cases import ADAM, BLOCK, LION, MOMENTUM, PIECE, PLAIN, RULES, STRIP
from hypothesis import strategies as st
from kernel_cases import AROUND, DTYPES, FP16, SCALES, Lists
from sampling import fixed_draws

from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar.testing import assert_same_bits

pytestmark = [pytest.mark.usefixtures("one_thread"), implementations.needs_native]

given = fixed_draws(60)

# Sizes and offsets

SIZES = [0, 1, 2, 7, 15, 31, 33, STRIP - 1, STRIP, STRIP + 1, 3 * STRIP + 5, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]


@pytest.mark.parametrize("implementation", implementations.ALL)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{rule.mode}")
def test_any_size(rule, implementation):
    for number, numel in enumerate(SIZES):
        grad, accumulated = DTYPES[number % 3], number % 2 == 0
        Lists.drawn(rule, numel, grad=grad, accumulated=accumulated).check(implementation)


@pytest.mark.parametrize("numel", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + STRIP + 1, (1 << 20) + 3])
@pytest.mark.parametrize("implementation", implementations.ALL)
def test_sizes_about_a_piece_and_a_page(implementation, numel):
    Lists.drawn(RULES[-5] if numel > 1 << 20 else ADAM, numel).check(implementation)


@pytest.mark.parametrize("variant", implementations.NATIVE)
@given(
    st.sampled_from(RULES),
    st.integers(0, 1200),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.booleans(),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
)
def test_any_start(variant, rule, numel, grad, param, accumulated, firsts):
    """Each list has its own offset, and the surrounding memory is not changed."""
    lists = Lists.drawn(rule, numel, grad=grad, param=param, accumulated=accumulated, firsts=firsts)
    lists.check(CppBackend.find(variant, 2))
    chunks = lists.after(CppBackend.find(variant, 2))
    for name, first in lists.firsts.items():
        assert (chunks[name][:first] == AROUND).all() and (chunks[name][first + numel :] == AROUND).all()


@pytest.mark.parametrize("variant", implementations.NATIVE)
@given(
    st.sampled_from(RULES),
    st.integers(1, 3000).flatmap(lambda numel: st.tuples(st.just(numel), st.lists(st.integers(0, numel), max_size=5))),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
)
def test_a_cut_anywhere_changes_nothing(variant, rule, size_and_cuts, grad, threads):
    numel, shard_bounds = size_and_cuts
    lists = Lists.drawn(rule, numel, grad=grad, accumulated=True, firsts=(1, 2, 3))
    lists.check(CppBackend.find(variant, threads), shard_bounds=shard_bounds)


@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_any_number_of_threads_and_cuts_about_a_piece(variant):
    for threads in (1, 2, 3, 4):
        Lists.drawn(ADAM, 4 * PIECE + 77).check(CppBackend.find(variant, threads), elsewhere=(0,))
    lists = Lists.drawn(LION, PIECE + 900, grad=FP16)
    for shard_bounds in ([1], [PIECE - 1], [PIECE], [PIECE + 1], [33, PIECE // 2 + 1, PIECE + 899]):
        lists.check(CppBackend.find(variant, 2), shard_bounds=shard_bounds)


@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_spans_of_one_call_have_their_own_sizes_dtypes_and_hyper_parameters(variant):
    rules = [replace(ADAM, lr=10.0**-n, step=n + 1, weight_decay=0.1 * (n % 2), decoupled=n % 3 > 0) for n in range(12)]
    rules += [replace(ADAM, beta1=0.3), MOMENTUM, replace(MOMENTUM, nesterov=True), PLAIN, LION, ADAM, ADAM]
    drawn = [
        Lists.drawn(rule, 37 * n, grad=DTYPES[n % 3], param=(None, *DTYPES)[n % 4], accumulated=n % 2 == 0, seed=n)
        for n, rule in enumerate(rules)
    ]
    for scales in ((), (0.3,), SCALES):
        found = [lists.copy() for lists in drawn]
        CppBackend.find(variant, 3).update([lists.span() for lists in found], scales)
        for before, lists in zip(drawn, found, strict=True):
            assert_same_bits(before.after(EagerBackend(), scales), lists.chunks, str(lists.rule))


@pytest.mark.parametrize("spans", [[], [Lists.drawn(ADAM, 0).span()]], ids=["no span", "an empty span"])
def test_nothing_to_do(spans):
    CppBackend.find().update(spans, ())
    assert CppBackend.find().grad_stats([span.grad for span in spans], ()).squares == (0.0,) * len(spans)


def test_an_unknown_variant_is_refused_with_those_that_run():
    kernel, lists = CppBackend.find("avx1024"), Lists.drawn(ADAM, 10)
    span = lists.span()
    for call, given_lists in ((kernel.update, span), (kernel.start, span), (kernel.grad_stats, span.grad)):
        with pytest.raises(ValueError) as caught:
            call([given_lists], ())
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", implementations.NATIVE)
@fixed_draws(300)(
    st.sampled_from(RULES),
    st.integers(PIECE - 5000, 3 * PIECE + 5000),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
    st.integers(1, 4),
    st.data(),
)
def test_pieces_in_any_number(variant, rule, numel, grad, param, firsts, threads, data):
    shard_bounds = data.draw(st.lists(st.integers(0, numel), max_size=4))
    lists = Lists.drawn(rule, numel, grad=grad, param=param, firsts=firsts)
    lists.check(CppBackend.find(variant, threads), shard_bounds=shard_bounds)
