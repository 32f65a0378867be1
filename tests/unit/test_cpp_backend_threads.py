"""C++ backend and process state: denormal flushing, running updates, the GIL, the thread pool and forks."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import implementations
import pytest
import torch
from cpp_backend_cases import ADAM, BLOCK, MOMENTUM, PIECE, PLAIN
from kernel_cases import FP16, FP32, SCALES, Lists

from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.update_rule import Gradient
from patrickstar.testing import assert_same_bits

pytestmark = [pytest.mark.usefixtures("one_thread"), implementations.needs_native]


@contextmanager
def flushing():
    """Flush denormals in this thread."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine can't flush denormal numbers")
    try:
        assert flushes(), "denormals are not flushed, so this test would prove nothing"
        yield
    finally:
        torch.set_flush_denormal(False)


def flushes():
    return float(torch.tensor([1e-40]) * 1.0) == 0.0


def denormal(numel, rule):
    """Return lists in which most numbers are denormal before and after the update."""
    lists = Lists.drawn(rule, numel, grad=FP32, param=FP16)
    for name, chunk in lists.chunks.items():
        chunk *= 1e-6 if name == "param" else 1e-39
    return lists


@pytest.mark.parametrize("numel", [100, PIECE + 100], ids=["one piece", "several"])
@pytest.mark.parametrize("variant", implementations.NATIVE)
def test_flushing_denormal_numbers_in_the_calling_thread_changes_nothing(variant, numel):
    kernel, lists = CppBackend.find(variant, 2), denormal(numel, replace(MOMENTUM, weight_decay=0.3))
    grads = [lists.span().grad, Gradient(torch.full((BLOCK + 5,), 1e-41))]
    expected, grad_stats = lists.after(EagerBackend()), EagerBackend().grad_stats(grads, SCALES)
    found = lists.copy()
    spans = [found.span()]
    with flushing():
        kernel.update(spans, SCALES)
        found_stats = kernel.grad_stats(grads, SCALES)
    assert_same_bits(expected, found.chunks, "with denormals flushed outside")
    assert found_stats == grad_stats
    assert min(grad_stats.squares) > 0


@pytest.mark.parametrize(("lr", "scales"), [(1e-40, (1e30,)), (PLAIN.lr, (1e-40, 1e30))], ids=["the rate", "a scale"])
def test_flushing_does_not_reach_what_is_denormal_among_scalars(lr, scales):
    """Scalars are rounded to float32 in the calling thread."""
    lists = Lists.drawn(replace(PLAIN, lr=lr), 100, grad=FP32)
    lists.chunks["master"].zero_()
    expected, found = lists.after(EagerBackend(), scales), lists.copy()
    assert expected["master"].count_nonzero() == 100
    spans = [found.span()]
    with flushing():
        CppBackend.find().update(spans, scales)
    assert_same_bits(expected, found.chunks, "with denormals flushed outside")


def test_the_callers_own_setting_stays():
    with flushing():
        for numel in (10, PIECE + 10):
            CppBackend.find().update([denormal(numel, PLAIN).span()], ())
            assert flushes()
    CppBackend.find().update([denormal(10, PLAIN).span()], ())
    assert not flushes()


def test_an_update_may_be_finished_later():
    """Several updates may run at once, and each keeps its tensors alive."""
    kernel = CppBackend.find(None, 2)
    all_lists = [Lists.drawn(ADAM, numel, seed=numel) for numel in (10, PIECE + 5, 3 * PIECE)]
    copies = [lists.copy() for lists in all_lists]
    running = [kernel.start([lists.span()], SCALES) for lists in copies]
    for one in reversed(running):
        one.wait()
        one.wait()  # a second call has no effect
    for lists, copy in zip(all_lists, copies, strict=True):
        assert_same_bits(lists.after(EagerBackend()), copy.chunks, "finished later")


def test_an_update_that_nobody_finishes_is_waited_for():
    """Otherwise its memory could be freed or read while threads still write to it."""
    lists = Lists.drawn(ADAM, 3 * PIECE)
    found = lists.copy()
    running = CppBackend.find(None, 1).start([found.span()], SCALES)
    del running
    assert_same_bits(lists.after(EagerBackend()), found.chunks, "dropped")


def test_other_python_threads_run_during_an_update():
    ticks, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(1e-4)  # lets the main thread take the GIL between ticks, and keep it if it can

    def ticks_during(calls):
        lists = Lists.drawn(PLAIN, 64 * PIECE)
        spans = [lists.span()] * calls  # in sequence on one thread
        before = ticks[0]
        CppBackend.find("baseline", 1).update(spans, ())
        return ticks[0] - before

    counter = threading.Thread(target=count)
    counter.start()
    try:
        calls = 64
        while ticks_during(calls) < 10 and calls < 1 << 14:
            calls *= 2
        assert calls < 1 << 14, "no other Python thread ran during an update of seconds"
    finally:
        stop.set()
        counter.join()


def threads_that_start_while_denormals_are_flushed_do_not_flush_them():
    kernel, lists = CppBackend.find(None, 2), denormal(3 * PIECE, PLAIN)
    expected, found = lists.after(EagerBackend()), lists.copy()
    spans = [found.span()]
    assert kernel.pool_size == 0
    flushes = torch.set_flush_denormal(True)
    kernel.update(spans, SCALES)
    torch.set_flush_denormal(False)
    assert kernel.pool_size == 2
    assert_same_bits(expected, found.chunks, f"threads started while denormals were flushed: {flushes}")


def threads_share_a_short_update():
    """One thread reaches a part of the memory's rate; only a single piece is not worth another one."""
    kernel, lists = CppBackend.find(None, 3), Lists.drawn(ADAM, PIECE)
    lists.after(kernel)
    assert kernel.pool_size == 0, kernel.pool_size
    lists = Lists.drawn(ADAM, 1 << 16)
    expected = lists.after(EagerBackend())
    running = kernel.start([(found := lists.copy()).span()], SCALES)
    assert kernel.pool_size == 3, kernel.pool_size
    running.wait()
    assert_same_bits(expected, found.chunks, "shared by threads")


def two_python_threads_share_the_pool():
    kernel = CppBackend.find(None, 2)
    assert kernel.pool_size == 0, kernel.pool_size
    lists = [Lists.drawn(ADAM, 3 * PIECE + 5, seed=seed) for seed in range(2)]
    expected = [one.after(EagerBackend()) for one in lists]
    start = threading.Barrier(2)

    def work(number):
        start.wait()
        for _ in range(6):
            assert_same_bits(expected[number], lists[number].after(kernel), f"thread {number}")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    assert kernel.pool_size == 2, kernel.pool_size
    CppBackend.find(None, 3).update([lists[0].copy().span()], ())
    assert kernel.pool_size == 3, kernel.pool_size
    kernel.grad_stats([lists[0].span().grad], ())
    assert kernel.pool_size == 3, kernel.pool_size


def after_a_fork_parent_and_child_can_both_update():
    kernel = CppBackend.find(None, 2)
    lists = Lists.drawn(ADAM, 2 * PIECE + 5)
    expected = lists.after(EagerBackend())
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


IN_CHILDREN = [
    threads_that_start_while_denormals_are_flushed_do_not_flush_them,
    threads_share_a_short_update,
    two_python_threads_share_the_pool,
    after_a_fork_parent_and_child_can_both_update,
]
PROGRAM = """
import os, sys, traceback
import test_cpp_backend_threads as module

module.torch.set_num_threads(1)
for function in module.IN_CHILDREN:
    if not (child := os.fork()):
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), function.__name__, flush=True)
"""


@pytest.fixture(scope="module")
def ended():
    """Run each function in a child of one new process, whose pool has no threads: importing torch takes the longest."""
    program = f"import sys\nsys.path[:0] = {sys.path!r}\n{PROGRAM}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("function", IN_CHILDREN, ids=lambda function: function.__name__)
def test_in_a_process_without_threads(function, ended):
    assert f"0 {function.__name__}" in ended.stdout.splitlines(), ended.stderr
