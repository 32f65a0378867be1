"""Small programs for the tests of `benchmarks/gpu_stages/turns.py`."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from gpu_stages.record import Record


def note_time(record: Record, options: SimpleNamespace) -> None:
    """Record when it begins and ends; wait until as many files as programs of its turn are in a directory."""
    record.figure("begin", time.monotonic(), "s")
    if options.together:
        (Path(options.folder) / str(os.getpid())).touch()
    while len(os.listdir(options.folder)) < options.together:
        time.sleep(0.01)
    record.figure("end", time.monotonic(), "s")


def fail(record: Record, options: SimpleNamespace) -> None:
    """Fail after a result."""
    record.check("before the failure", True)
    raise RuntimeError("made to fail")


def hang(record: Record, options: SimpleNamespace) -> None:
    """Start a process that never ends, and wait for it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    record.figure("process", child.pid, "")
    child.wait()
