"""Training on the strict device without one statement that waits: `make mutations`.

[Note: removed statements]
Each statement below waits for the device or a worker, orders streams, or keeps memory where work in progress uses it.
With one of them removed, a scenario of `scenarios.py` should give other bits, fail or never end. Statements are found
by what they call, so that a new one is tried too.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import scenarios

MODULES = {
    "accelerator": "_memory",
    "chunk": "_memory",
    "chunk_manager": "_memory",
    "copy_streams": "_memory",
    "device_eviction": "_memory",
    "disk_tier": "_memory",
    "host_tier": "_memory",
    "transfers": "_memory",
    "optimizer_in_backward": "_step",
    "optimizer_step": "_step",
    "streamed_update": "_step",
}
CALLS = {
    "complete",
    "complete_io",
    "ensure_in_memory",
    "finish",
    "finish_streamed",
    "order",
    "wait",
    "wait_event",
    "wait_fetch",
    "wait_for_d2h",
    "wait_idle",
    "wait_stream",
    "synchronize",
    "_wait_for_transfers",
}
SCENARIOS = 160
"""Scenarios without a failure before a statement counts as unnoticed."""
LIMIT_S = 150


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


def outcome(module: str, path: str, line: int) -> str:
    """Run scenarios without a statement; return how they ended, or an empty string if none failed."""
    program = [sys.executable, scenarios.__file__, module, path, str(line), str(SCENARIOS)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    except subprocess.TimeoutExpired:
        return "never ends"
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.strip().splitlines()
    return (
        f"signal {-ended.returncode}"
        if ended.returncode < 0
        else next((line for line in lines[::-1] if "Error" in line), lines[-1])
    )


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
