"""Processes for a test: started together, bounded in time, their words and errors collected."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@dataclass
class Ended:
    """How one process ended, and what it said."""

    code: int | None
    """None if it had to be stopped, since its time was over."""
    text: str
    seconds: float


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start(
    size: int,
    function: Callable[..., None],
    options: dict[str, Any] | None = None,
    *,
    env: Sequence[dict[str, str]] = (),
    before: Sequence[list[str]] = (),
    port: int | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start `function(**options)` in each of `size` processes, as torchrun would.

    env, before: of each process its own variables, and what its command begins with.
    """
    port = port or free_port()
    processes = []
    for rank in range(size):
        logs = tempfile.TemporaryFile()  # noqa: SIM115 (`wait` closes it)
        process = subprocess.Popen(
            [
                *(before[rank] if before else []),
                *(sys.executable, "-m", __name__),
                *(function.__module__, function.__name__, json.dumps(options or {})),
            ],
            cwd=TESTS,
            stdout=logs,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(TESTS),
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            | (env[rank] if env else {}),
        )
        process.logs = logs  # type: ignore[attr-defined]
        processes.append(process)
    return processes


def wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[Ended]:
    """Wait until all have ended; those that have not in time are killed."""
    started = time.monotonic()
    ended: dict[int, Ended] = {}
    while len(ended) < len(processes):
        late = time.monotonic() - started > seconds
        for rank, process in enumerate(processes):
            if rank in ended:
                continue
            code = process.poll()
            if code is None and not late:
                continue
            if code is None:
                process.kill()
                process.wait()
            with process.logs as logs:  # type: ignore[attr-defined]
                logs.seek(0)
                text = logs.read().decode(errors="replace")
            ended[rank] = Ended(code, text, time.monotonic() - started)
        time.sleep(0.02)
    return [ended[rank] for rank in range(len(processes))]


def run(size: int, function: Callable[..., None], seconds: float = 120, **options: Any) -> list[Ended]:
    """Run `function` in `size` processes, each of which has to succeed within the time."""
    ended = wait(start(size, function, options), seconds)
    for rank, one in enumerate(ended):
        how = "did not end in time" if one.code is None else f"ended with {one.code}"
        assert one.code == 0, f"rank {rank} of {size} {how}:\n{one.text[-6000:]}"
    return ended


def main() -> None:
    """One of the processes."""
    import importlib
    import warnings

    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    module, name, options = sys.argv[1:]
    getattr(importlib.import_module(module), name)(**json.loads(options))


if __name__ == "__main__":
    main()
