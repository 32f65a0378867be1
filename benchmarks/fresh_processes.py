"""Resident memory, and functions in fresh processes: what a library has initialized affects that of later runs."""

import multiprocessing
import os
import re
import resource
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

import torch
from steps import seconds_of

_Case = TypeVar("_Case")
_Result = TypeVar("_Result")


def resident_peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes(field: str) -> int:
    """Return resident memory: VmRSS is the current usage, VmHWM the peak since `growth` or the process start."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def growth(action: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of an action, and the peak growth of resident memory while it runs."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    seconds = seconds_of(action)
    return seconds, resident_bytes("VmHWM") - before


def rendezvous(size: int, threads: int) -> None:
    """Set the environment in which `size` processes of this machine find each other, with so many threads each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": str(threads)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def apart(function: Callable[..., _Result], *args: Any) -> _Result:
    """Return `function(*args)`, called in a new interpreter of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def in_fresh_processes(function: Callable[..., _Result], cases: Iterable[_Case]) -> Iterator[tuple[_Case, _Result]]:
    """Yield each case with `function(case, apply)`, in order; cases run side by side, one per core.

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
