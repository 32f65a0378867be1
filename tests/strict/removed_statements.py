"""Tests without one statement that waits: `make mutations`.

[Note: removed statements]
Each statement below waits for the device or a worker, orders streams, or keeps memory where work in progress uses it.
With one of them removed, a test fails, or a scenario of `scenarios.py` gives other bits, fails or never ends.
Statements are found by what they call, so that a new one is tried too.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import removal

MODULES = {
    "async_save": "_checkpoint",
    "direct_writer": "_checkpoint",
    "accelerator": "_memory",
    "chunk": "_memory",
    "chunk_manager": "_memory",
    "copy_streams": "_memory",
    "device_eviction": "_memory",
    "device_tier": "_memory",
    "disk_tier": "_memory",
    "host_tier": "_memory",
    "transfers": "_memory",
    "delayed_update": "_step",
    "disk_optimizer_step": "_step",
    "disk_speculation": "_step",
    "gradient_buffer": "_step",
    "host_speculation": "_step",
    "lock_free_update": "_step",
    "optimizer_in_backward": "_step",
    "optimizer_step": "_step",
    "pages_in_memory": "_step",
    "read_ahead": "_step",
    "running_updates": "_step",
    "speculation": "_step",
    "streamed_update": "_step",
    "update_tiers": "_step",
}
CALLS = {
    "cancel",
    "cancel_running",
    "complete",
    "complete_in_order",
    "complete_io",
    "ensure_in_memory",
    "finish",
    "finish_first",
    "finish_running",
    "finish_one",
    "order",
    "wait",
    "wait_event",
    "wait_fetch",
    "wait_for_d2h",
    "wait_for_save",
    "wait_for_update",
    "wait_idle",
    "wait_stream",
    "synchronize",
    "_end_or_withdraw",
    "_end_running",
    "_finish",
    "_order",
    "_wait_for",
    "_wait_for_transfers",
}
TESTS = "unit/test_in_flight.py", "unit/test_host_tier.py", "unit/test_disk_optimizer_step.py"
STRICT = (
    *("test_streamed_updates.py", "test_chunks.py", "test_disk_updates.py", "test_saves.py"),
    *("test_running_updates.py", "test_speculation.py", "test_delayed.py", "test_lock_free.py"),
)
SCENARIOS = 160
"""Scenarios without a failure before a statement counts as unnoticed."""
LIMIT_S = 600
"""Seconds after which a program counts as one that never ends."""


def statements() -> list[tuple[str, str, int, str]]:
    """Return module, path, line and text of every statement that calls one of `CALLS` or changes `pins`."""
    found = []
    for name, package in MODULES.items():
        module = f"patrickstar.{package}.{name}"
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text()
        for node in ast.walk(ast.parse(text)):
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            called = getattr(call.func, "attr", getattr(call.func, "id", "")) if call is not None else ""
            pins = (
                isinstance(node, ast.AugAssign)
                and isinstance(node.op, ast.Add)
                and ast.unparse(node.target) == "chunk.pins"
            )
            if called in CALLS or pins:
                found.append((module, spec.origin, node.lineno, ast.unparse(node)))
    return found


def programs() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the programs that may notice a removed statement, the shortest first: name, arguments and environment."""
    here = Path(__file__).parent
    tests = here.parent
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "removal"]
    strict = {"PATRICKSTAR_TEST_DEVICE": "strict"}
    yield "tests", [*pytest, *(str(tests / path) for path in TESTS)], {}
    yield "strict device", [*pytest, *(str(here / path) for path in STRICT)], strict
    yield "late copies", [*pytest, str(tests / "laws/test_late_copies.py"), "-k", "schedule_of_late"], {}
    yield "scenarios", [str(here / "scenarios.py"), str(SCENARIOS)], strict


def outcome(module: str, path: str, line: int, only: str = "") -> str:
    """Run tests and scenarios without a statement.

    Args:
        only: Name of the only program to be run.

    Returns:
        What noticed it and how it ended; an empty string if nothing did.
    """
    base = {name: value for name, value in os.environ.items() if name != "PATRICKSTAR_TEST_DEVICE"}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    base[removal.VARIABLE] = f"{module} {path} {line}"
    for name, program, env in programs():
        if only not in ("", name):
            continue
        try:
            ended = subprocess.run(
                [sys.executable, *program], capture_output=True, text=True, timeout=LIMIT_S, env=base | env
            )
        except subprocess.TimeoutExpired:
            return f"{name}: never ends"
        if ended.returncode:
            return f"{name}: {_reason(ended)}"
        if name == "scenarios" and ended.stdout != _refused():
            return f"{name}: other scenarios are refused"
    return ""


@cache
def _refused() -> str:
    """Return what the scenarios print without a removed statement: the seeds whose budgets are too small."""
    program = [sys.executable, str(Path(__file__).parent / "scenarios.py"), str(SCENARIOS)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATRICKSTAR_TEST_DEVICE": "strict"}
    return subprocess.run(program, capture_output=True, text=True, check=True, env=env).stdout


def _reason(ended: subprocess.CompletedProcess[str]) -> str:
    """Return how a program failed."""
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" - ")[0].rsplit("/", 1)[-1]
    if ended.returncode < 0:
        return f"signal {-ended.returncode}"
    lines = ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines() or [""]
    return next((line for line in lines[::-1] if "Error" in line), lines[-1])


def main(only: str = "") -> int:
    """Print how training ends without each statement; return the number of statements that nothing noticed.

    Args:
        only: Part of `module: statement`; others are left out.
    """
    found = [each for each in statements() if only in f"{each[0].split('.')[-1]}: {each[3]}"]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda each: outcome(*each[:3]), found))
    for (module, _, _, text), ended in zip(found, ends, strict=True):
        print(f"| {module.split('.')[-1]} | `{text}` | {ended[:90] or 'unnoticed'} |")
    return ends.count("")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
