"""The command as a user meets it: exit codes, messages, and no traceback unless asked for."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import assert_refused, call, done

import patrickstar
from patrickstar.errors import BudgetError

pytestmark = pytest.mark.usefixtures("small_text")

train = partial(call, "train", "--device", "cpu")
TINY = ("--data", "text.py", "--model", "model.json", "--sequence", 16)


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


def test_the_version_is_the_packages() -> None:
    assert done("--version").stdout == f"patrickstar {patrickstar.__version__}\n"


def test_help_names_the_command_and_its_options() -> None:
    assert "train" in call("--help").stdout
    listed = call("train", "--help").stdout
    for option in ("--device-memory", "--activation-offload", "--no-activation-checkpointing", "--traceback"):
        assert option in listed


def test_the_module_runs_as_the_command() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "patrickstar", "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout == f"patrickstar {patrickstar.__version__}\n"


REFUSED = {
    "no precision": (["--precision", "bf17"], ["--precision"]),
    "no device": (["--device", "tpu"], ["--device"]),
    "a sequence too long": (["--data", "text.py", "--sequence", 1025], ["1024 or less instead of 1025"]),
    "no log": ([*TINY, "--log", "text.py/log.jsonl"], ["text.py/log.jsonl", "choose another path"]),
    "a budget too small": (
        [*TINY, "--device-memory", "1KiB"],
        ["device budget of 1.00 KiB", "Each of these alone is enough", "--device-memory "],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_named(case: str) -> None:
    arguments, parts = REFUSED[case]
    assert_refused(train(*arguments), *parts)


def test_too_little_text_is_told() -> None:
    Path("text.py").write_text("no")
    assert_refused(train(*TINY), "less than one sequence of 16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_told() -> None:
    assert_refused(call("train", "--data", "text.py", "--device", "cuda"), "'cuda' is not available")


def test_a_traceback_shows_when_it_is_asked_for() -> None:
    result = train("--model", "gpt-1m", "--data", "nowhere", "--traceback")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "refuse_missing_text" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BudgetError("too small"), 2, "error: too small\n"),
        (ValueError("odd"), 1, "internal error: ValueError: odd; this is a bug, --traceback shows where\n"),
        (KeyboardInterrupt(), 130, "interrupted before the first step was done\n"),
    ],
)
def test_every_error_is_one_line(monkeypatch, error: BaseException, code: int, message: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("patrickstar._cli.train.train", fail)
    result = train()
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    process = python("import sys; sys.modules['typer'] = None; from patrickstar.__main__ import main; main()")
    assert process.returncode == 1
    assert process.stderr == "the command line needs typer: pip install '.[cli]' in the clone of PatrickStar\n"
