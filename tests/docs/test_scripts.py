"""Every page and every example runs as a reader runs it: as a script, in a fresh folder, with two threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .downloads import DOWNLOADS
from .pages import PAGES, blocks, commands, matches

pytestmark = pytest.mark.slow
"""Each takes a process, whose imports take seconds."""

END = "\x1eend of the block\x1e"
"""What is printed behind each block, so that the output of each is known."""
WITH_CODE = [page for page in PAGES if any(block.language == "python" and not block.not_run for block in blocks(page))]
EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PRINTED = {
    "accelerate_loop": ("--steps 4", "peak of model data"),
    "dpo": ("--steps 2", "parameters of the reference model in chunks"),
    "experts": ("--steps 3", "step 3: loss"),
    "larger_than_budget": ("", "of model data, "),
    "lightning_fit": ("--steps 4", "peak of model data"),
    "ray_train": ("--steps 4", "parameters "),
    "restart": ("", "finished, parameters"),
    "trainer": ("--steps 4", "peak of model data"),
}
"""Options of each example, for fewer steps than its own, and a part of what it prints at its end."""
PROCESSES = {"experts": 4, "restart": 2}
ELSEWHERE = {"kill_me"}
"""Run by `tests/distributed/test_kills.py`."""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a folder, with two threads and without downloads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    environment |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)


def assert_ended_well(ended: subprocess.CompletedProcess[str]) -> None:
    said = f"{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, said
    assert "Exception ignored" not in ended.stderr, said


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_a_page_runs_as_a_script(page: Path, tmp_path: Path) -> None:
    if page.stem in DOWNLOADS:
        DOWNLOADS[page.stem](tmp_path)
    every = [block for block in blocks(page) if not block.not_run]
    codes = [block.code for block in every if block.language == "python"]
    (tmp_path / "page.py").write_text("".join(f"{code}\nprint({END!r})\n" for code in codes))
    ended = run(tmp_path, "page.py")
    assert_ended_well(ended)
    *printed, rest = ended.stdout.split(f"{END}\n")
    assert len(printed) == len(codes) and not rest
    outputs = iter(printed)
    shown = ""
    for block in every:
        if block.language == "python":
            shown = next(outputs)
        elif block.language == "text" and block.follows:
            assert matches(block.code, shown), f"{block.name}: the page says\n{block.code}\nand it prints\n{shown}"
        elif block.language == "sh":
            for words in (command.split() for command in commands(block)):
                logs = [tmp_path / word for word in words if word.endswith(".jsonl")]
                if words[:2] == ["patrickstar", "report"] and all(log.exists() for log in logs):
                    assert_ended_well(run(tmp_path, "-m", *words))


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - ELSEWHERE))
def test_an_example_runs_as_a_script(name: str, tmp_path: Path) -> None:
    if name == "ray_train":
        pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    launcher = (*TWO_PROCESSES, str(PROCESSES[name])) if name in PROCESSES else ()
    options, printed = PRINTED[name]
    ended = run(tmp_path, *launcher, str(EXAMPLES / f"{name}.py"), *options.split())
    assert_ended_well(ended)
    assert printed in ended.stdout


def test_outputs_that_differ_are_found(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("raise SystemExit(print('Traceback'))")
    assert_ended_well(run(tmp_path, "page.py"))
    (tmp_path / "page.py").write_text("1 / 0")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        assert_ended_well(run(tmp_path, "page.py"))
