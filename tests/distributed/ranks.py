"""Start the ranks of a distributed test, wait for them within a time limit, and collect their output.

Ranks are forked from a server that has imported torch and patrickstar once per test process (`multiprocessing`'s fork
server), which saves three seconds of imports per rank.
"""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TESTS = Path(__file__).parents[1]
WITHIN_S = 600.0
"""Seconds that ranks have by default: many times what they need, since the machine may be busy."""
PRELOADED = [
    "strict.removal",  # before what may lack a statement in `make mutations`
    "hypothesis",
    "hypothesis.strategies",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "patrickstar",
    "patrickstar._engine.engine_checkpoint",
    "patrickstar.testing",
    "pytest",
    "patrickstar._cli.train",
    "patrickstar.integrations.transformers",
    "torch.distributed.tensor.parallel",
    "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "qwen2_moe", "qwen3")),
    "distributed.preloaded",
]


@dataclass
class Ended:
    """Result of one rank. `code` is the exit code, None if the rank was killed at the time limit."""

    code: int | None
    text: str
    seconds: float


def joined(function: Callable[..., None]) -> Callable[..., None]:
    """Join the processes for a function of each rank; at its end destroy all process groups, also those of meshes."""

    @wraps(function)
    def run(**options: Any) -> None:
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
        function(**options)
        if dist.is_initialized():
            dist.destroy_process_group()

    return run


@cache
def mesh(**sizes: int) -> DeviceMesh:
    """Return the mesh of all processes with these sizes by name.

    A process makes each once: the threads of a mesh's process groups run until the groups are destroyed.
    """
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def seeds(count: int, first: int = 0) -> list[int]:
    """Return the seeds of `count` random cases, of which `make test` runs an eighth: each runs in several processes."""
    from sampling import nightly  # its import takes half a second, which new interpreters need not spend

    return list(range(first, first + (count if nightly() else -(-count // 8))))


def free_port() -> int:
    """Return a port that is not in use at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@cache
def fork_server() -> Any:
    """Return the `multiprocessing` context of this process's fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        forkserver.ensure_running()
    return context


class ForkedRank(ForkServerProcess):
    """A rank that was forked from the server, with the methods of `subprocess.Popen` that tests use."""

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), None while the rank runs."""
        return self.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end, at most `seconds`; return the exit code."""
        self.join(seconds)
        return self.exitcode


def _run_forked(module: str, name: str, options: str, env: dict[str, str], path: list[str], log: str) -> None:
    """Run one rank in a child of the fork server, as a new interpreter would, and end the process."""
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    os.chdir(TESTS)
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        run_rank(module, name, options)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # a child of the fork server does not run them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(
    size: int,
    function: Callable[..., None],
    options: dict[str, Any] | None = None,
    *,
    env: Sequence[dict[str, str]] = (),
    interpreters: int = 0,
    port: int | None = None,
) -> list[Any]:
    """Start `function(**options)` in each of `size` processes, with the environment that torchrun sets.

    Args:
        size: Number of ranks.
        function: Function of an importable module, run in every rank.
        options: Keyword arguments of the function, as JSON values.
        env: Additional environment variables, per rank.
        interpreters: How many of the first ranks are new interpreters; the others are forked.
        port: Port of the rendezvous.
    """
    port = port or free_port()
    call = (function.__module__, function.__name__, json.dumps(options or {}))
    processes: list[Any] = []
    for rank in range(size):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **(env[rank] if env else {}),
        }
        log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (`wait` closes it)
        process: Any
        if rank < interpreters:
            command = [sys.executable, "-m", __name__, *call]
            process = subprocess.Popen(command, cwd=TESTS, stdout=log, stderr=subprocess.STDOUT, env=variables)
        else:
            process = ForkedRank(target=_run_forked, args=(*call, variables, list(sys.path), log.name), daemon=True)
            fork_server()
            process.start()
        process.log = log
        processes.append(process)
    return processes


def wait(processes: Sequence[Any], seconds: float = WITHIN_S) -> list[Ended]:
    """Wait until all ranks have ended, at most `seconds`, then kill the remaining ones."""
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
            log: IO[bytes]
            with process.log as log:
                log.seek(0)
                text = log.read().decode(errors="replace")
            ended[rank] = Ended(code, text, time.monotonic() - started)
        time.sleep(0.02)
    return [ended[rank] for rank in range(len(processes))]


def run(size: int, function: Callable[..., None], seconds: float = WITHIN_S, **options: Any) -> list[Ended]:
    """Run `function` in `size` ranks, and assert that each succeeds within `seconds`."""
    return _run(size, function, options, seconds)


def _run(size: int, function: Callable[..., None], options: dict[str, Any], seconds: float = WITHIN_S) -> list[Ended]:
    ended = wait(start(size, function, options), seconds)
    for rank, result in enumerate(ended):
        how = "did not end in time" if result.code is None else f"ended with {result.code}"
        assert result.code == 0, f"rank {rank} of {size} {how}:\n{result.text[-6000:]}"
    return ended


def in_processes(size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that runs in each of `size` processes, which have joined.

    Its parameters are those of the test, as JSON values; paths become text.

    Args:
        size: Number of processes. Default None: the test's parameter `size`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(**options: Any) -> None:
            values = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
            _run(size or values["size"], test, values)

        test.in_rank = joined(function)  # type: ignore[attr-defined]
        return test

    return decorate


def check_ended(ended: Sequence[Ended], codes: Sequence[int]) -> None:
    """Assert the exit codes."""
    assert [result.code for result in ended] == list(codes), "\n".join(result.text[-3000:] for result in ended)


def end(
    size: int, function: Callable[..., None], codes: Sequence[int], options: dict[str, Any] | None = None, **more: Any
) -> list[Ended]:
    """Start processes as `start` does, and assert the exit codes with which they end."""
    ended = wait(start(size, function, options, **more))
    check_ended(ended, codes)
    return ended


def die() -> None:
    """End this process as the system's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(module: str, name: str, options: str) -> None:
    """Run a function by the names of its module and itself; warnings are errors."""
    import importlib
    import warnings

    import rates
    import torch

    module_of_choice, _, measured = rates.MEASURED.rpartition(".")
    setattr(importlib.import_module(module_of_choice), measured, rates.fixed())
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    getattr(function, "in_rank", function)(**json.loads(options))


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
