"""Run a program with a time limit; its output is printed and recorded."""

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Done:
    """Result of a program; `problem` is empty if its exit code was 0."""

    returncode: int
    text: str
    problem: str


def run_logged(command: Sequence[str], environment: Mapping[str, str], *, limit_s: float, cwd: str) -> Done:
    """Run a program; kill it and its children at the time limit, or when this process dies."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_die_with_parent,
    )
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        _kill_tree(process.pid)

    timer = threading.Timer(limit_s, end)
    timer.start()
    lines = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        process.wait()
    finally:
        timer.cancel()
    problem = f"exit code {process.returncode}" if process.returncode else ""
    if timed_out.is_set():
        problem = f"ended at its limit of {limit_s:.3g} s"
    return Done(process.returncode, "".join(lines), problem)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
