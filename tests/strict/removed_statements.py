"""Tests without one statement that waits: `make mutations`.

[Note: removed statements]
Each statement below waits for the device or a worker, orders streams, or keeps memory where work in progress uses it.
With one of them removed, a test fails, or a scenario of `scenarios.py` gives other bits, fails or never ends.
Statements are found by what they call, so that a new one is tried too. Of the tests, those that run the statement are
tried, the shortest first.
"""

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import removal

MODULES = {
    "_checkpoint": "async_save direct_writer",
    "_chunks": "chunk_manager device_cache transfers",
    "_hardware": "accelerator",
    "_params": "chunk_comm local_shards one_process",
    "_step": "delayed_update disk_optimizer_step disk_speculation gradient_buffer host_speculation lock_free_update "
    "optimizer_in_backward optimizer_step read_ahead speculation streamed_update update update_queue "
    "update_dispatch update_tiers used_gradients",
    "_tiers": "chunk copy_streams device_tier disk_tier host_tier",
}
CALLS = {
    *("cancel", "cancel_running", "complete", "complete_update", "_release", "_release_all"),
    *("ensure_in_memory", "finish", "finish_all", "finish_first", "finish_pages", "_complete_delayed"),
    *("finish_one", "finish_running", "finish_update", "order", "settle", "synchronize"),
    *("wait", "wait_event", "wait_stream", "_arrive", "_end_or_withdraw", "_finish", "_order", "_wait_for"),
    "_wait_until_ready",
}
TESTS = (
    *("unit/test_chunk.py", "unit/test_transfers.py", "unit/test_host_tier.py", "unit/test_update_queue.py"),
    *("unit/test_streamed_update.py", "unit/test_chunk_comm.py", "laws/test_disk_optimizer_step.py"),
    "laws/test_delayed.py::test_a_parameter_without_a_gradient_is_written_once_the_update_of_its_chunk_has_ended",
)
STRICT = (
    *("test_streamed_updates.py", "test_chunks.py", "test_disk_updates.py", "test_saves.py"),
    *("test_running_updates.py", "test_speculation.py", "test_delayed.py", "test_lock_free.py", "test_timeline.py"),
    "test_host_waits.py::test_the_device_adds_to_sums_of_gradients_that_are_on_their_way_to_the_host",
)
RANKS = "test_exactness.py", "test_late_updates.py", "test_lock_free.py", "test_shards_on_disk.py", "test_resident.py"
LIMIT_S = 100
"""Seconds after which a test or scenario counts as one that never ends; the longest ends within 20."""
PYTEST = [
    *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "removal"),
    *("-o", f"faulthandler_timeout={LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"),
]
SCENARIOS = 160
"""Scenarios without a failure before a statement counts as unnoticed."""
PYTHONPATH = os.pathsep.join(map(str, Path(__file__).parents[:2]))


def statements() -> list[tuple[str, str, int, str]]:
    """Return module, path, line and text of every statement that calls one of `CALLS` or changes `pins`."""
    found = []
    names = [f"patrickstar.{package}.{name}" for package, names in MODULES.items() for name in names.split()]
    for module in names:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text()
        for node in ast.walk(ast.parse(text)):
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            called = getattr(call.func, "attr", getattr(call.func, "id", "")) if call is not None else ""
            if called in CALLS or (isinstance(node, ast.AugAssign) and ast.unparse(node).startswith("chunk.pins += ")):
                found.append((module, spec.origin, node.lineno, ast.unparse(node)))
    return found


def programs() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the programs that may notice a removed statement, the shortest first: name, arguments and environment."""
    folder = Path(__file__).parent
    tests = folder.parent
    strict = {"PATRICKSTAR_TEST_DEVICE": "strict"}
    yield "tests", [*PYTEST, *(str(tests / path) for path in TESTS)], {}
    yield "strict device", [*PYTEST, *(str(folder / path) for path in STRICT)], strict
    yield "strict ranks", [*PYTEST, str(folder / "test_two_processes.py")], strict
    yield "ranks", [*PYTEST, "-m", "not slow", *(str(tests / "distributed" / path) for path in RANKS)], {}
    yield "late copies", [*PYTEST, f"{tests}/laws/test_late_copies.py", "-k", "schedule_of_late"], {}
    yield "scenarios", [str(folder / "scenarios.py"), str(SCENARIOS), str(LIMIT_S)], strict


def tests_of(found: list[tuple[str, str, int, str]]) -> dict[str, dict[str, list[str]]]:
    """Run the tests, and return the names of those that run each statement, the shortest first, by program."""
    ran: dict[str, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, program, env in programs():
            if program[0] == "-m":
                file = Path(directory) / name
                file.write_text("".join(f"{module} {path} {line}\n" for module, path, line, _ in found))
                _run(program, env | {removal.PROBED: str(file)}).check_returncode()
                tests = [json.loads(row) for row in file.read_text().splitlines() if row.startswith("[")]
                ran[name] = {}
                for test, _, rows in sorted(tests, key=lambda test: test[1]):
                    for row in rows:
                        ran[name].setdefault(row, []).append(test)
    return ran


def _run(program: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name != "PATRICKSTAR_TEST_DEVICE"}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    folder = Path(__file__).parents[2]  # the names of tests are relative to it
    command = [sys.executable, *program]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=base | env, cwd=folder, start_new_session=True, text=True
        )
        process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for ever
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def outcome(
    module: str, path: str, line: int, only: str = "", tests: Mapping[str, Mapping[str, list[str]]] | None = None
) -> str:
    """Run programs without a statement until one notices it; return which did and how it ended.

    Args:
        module: Name of the module.
        path: Its file.
        line: Line of the statement.
        only: Name of the only program to run; all by default.
        tests: What `tests_of` returns; without it, all tests run.
    """
    removed = f"{module} {path} {line}"
    for name, program, env in programs():
        if only not in ("", name):
            continue
        if tests is not None and name in tests:
            program = [*PYTEST, *tests[name].get(removed, ())]
            if len(program) == len(PYTEST):
                continue
        ended = _run(program, env | {removal.VARIABLE: removed})
        if ended.returncode:
            return f"{name}: {_reason(ended)}"
        if name == "scenarios" and ended.stdout != _refused():
            return f"{name}: other scenarios are refused"
    return ""


@cache
def _refused() -> str:
    """Return what the scenarios print without a removed statement: the seeds whose budgets are too small."""
    *_, (_, program, env) = programs()
    ended = _run(program, env)
    ended.check_returncode()
    return ended.stdout


def _reason(ended: subprocess.CompletedProcess[str]) -> str:
    """Return how a program failed."""
    if any(line.startswith("Timeout (") for line in ended.stderr.splitlines()):
        return "never ends"
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" - ")[0].rsplit("/", 1)[-1]
    if ended.returncode < 0:
        return f"signal {-ended.returncode}"
    lines = ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines() or [""]
    return next((line for line in lines[::-1] if "Error" in line), lines[-1])


def main(only: str = "") -> int:
    """Print how training ends without each statement, or those with `only`; return the number that nothing noticed."""
    found = [each for each in statements() if only in f"{each[0].split('.')[-1]}: {each[3]}"]
    tests, unnoticed = tests_of(found), 0
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda each: outcome(*each[:3], tests=tests), found)
        for (module, _, _, text), ended in zip(found, ends, strict=True):
            unnoticed += not ended
            print(f"| {module.split('.')[-1]} | `{text}` | {ended[:90] or 'unnoticed'} |", flush=True)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
