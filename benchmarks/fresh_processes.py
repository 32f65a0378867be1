"""Run functions in fresh processes, one per core: what a library has initialized affects the memory of later runs."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import torch

_Case = TypeVar("_Case")
_Result = TypeVar("_Result")


def in_fresh_processes(function: Callable[..., _Result], cases: Iterable[_Case]) -> Iterator[tuple[_Case, _Result]]:
    """Yield each case with `function(case, apply)`, in order.

    `apply(work, *args)` calls `work(*args)` in a process of its own, with one thread for operators.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["foresight"])
    count = len(os.sched_getaffinity(0))
    with context.Pool(count, torch.set_num_threads, (1,), maxtasksperchild=1) as pool, ThreadPool(count) as drivers:

        def apply(work: Callable[..., Any], *args: Any) -> Any:
            return pool.apply(work, args)

        def run(case: _Case) -> tuple[_Case, _Result]:
            return case, function(case, apply)

        yield from drivers.imap(run, cases)
