"""Programs that are started at once and wait for their turns, so that their imports take no time of the machine.

Importing torch, transformers and this package takes ten seconds from a cold disk.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gpu_stages.record import MARK, READY, End, Entry, from_json

_PR_SET_PDEATHSIG = 1
READ_S = 5.0
"""Seconds to read the output of a program that has ended: one that it started may hold the pipe."""


@dataclass(frozen=True)
class Program:
    """A program of a call.

    Args:
        name: Name in the results.
        function: Its module and function, as "module:function".
        limit_s: Seconds from its turn on, after which it is killed.
        options: What its function gets, as attributes of one object.
        imports: Modules to import before its turn. Without one of them it is left out, which its results say.
        settings: Environment variables.
        wrapper: Command that runs it.
    """

    name: str
    function: str
    limit_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    imports: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    wrapper: Sequence[str] = ()


Turn = Sequence[Program]
"""Programs that run at the same time."""


class _Running:
    """A started program, whose output is printed line by line, with its name."""

    def __init__(self, program: Program, environment: Mapping[str, str], add: Callable[[str, Entry], None]) -> None:
        self.program = program
        self._add = add
        self._ready = threading.Event()
        self._began_s: float | None = None
        self._limit_s = program.limit_s
        self.process = subprocess.Popen(
            [
                *(*program.wrapper, sys.executable, "-m", "gpu_stages.program"),
                *(program.function, json.dumps(dict(program.options)), *program.imports),
            ],
            env={**environment, **program.settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(READY):
                self._ready.set()
                continue
            print(f"[{self.program.name}] {line}", end="", flush=True)
            if line.startswith(MARK):
                self._add(self.program.name, from_json(json.loads(line.removeprefix(MARK))))
        self._ready.set()

    def begin(self, limit_s: float) -> None:
        """Give it its turn, for at most `limit_s`."""
        assert self.process.stdin is not None
        began_s = time.monotonic()
        self._limit_s = min(limit_s, self.program.limit_s)
        self._ready.wait(self._limit_s)
        self._began_s = began_s
        with suppress(BrokenPipeError):  # it has ended, which `report` says
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def report(self) -> None:
        """Wait for its end, kill it at its limit, and add how it ended to the results."""
        assert self._began_s is not None, "it had no turn"
        timed_out = False
        try:
            self.process.wait(max(0.0, self._began_s + self._limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds = time.monotonic() - self._began_s
        self.kill()
        code = self.process.returncode
        problem = f"exit code {code}" if code else ""
        if timed_out:
            problem = f"killed at its limit of {self._limit_s:.3g} s"
        self._add(self.program.name, End(seconds, problem))

    def kill(self) -> None:
        """End it, and all that it has started."""
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(READ_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(BrokenPipeError):
                pipe.close()


def run_turns(
    turns: Sequence[Turn], environment: Mapping[str, str], limit_s: float, add: Callable[[str, Entry], None]
) -> None:
    """Start all programs, and let one turn run after the other.

    Args:
        environment: Environment variables of all programs.
        limit_s: Seconds for all of them. What has not begun by then ends without a turn.
        add: Called with the name of a program and an entry of it: its results, and its end. Entries come one at a time.
    """
    deadline_s = time.monotonic() + limit_s
    lock = threading.Lock()

    def locked(name: str, entry: Entry) -> None:
        with lock:
            add(name, entry)

    running: list[list[_Running]] = []
    try:
        for turn in turns:
            running.append([])
            for program in turn:
                running[-1].append(_Running(program, environment, locked))
        for group in running:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                for each in group:
                    locked(each.program.name, End(0.0, "no time left"))
                continue
            for each in group:
                each.begin(left_s)
            waits = [threading.Thread(target=each.report, daemon=True) for each in group]
            for wait in waits:
                wait.start()
            for wait in waits:
                wait.join()
    finally:
        for group in running:
            for each in group:
                each.kill()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
