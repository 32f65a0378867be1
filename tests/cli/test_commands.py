"""The command as a user meets it: exit codes, messages, and no traceback unless asked for."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner, Result

import patrickstar
from patrickstar._cli.main import app
from patrickstar.errors import BudgetError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Boxes around usage errors are as wide as the terminal: wide enough for every message on one line.
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "text.py"
    file.write_text("print('hello')\n" * 200)
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(*arguments: object) -> Result:
    return run("train", "--device", "cpu", *arguments)


def assert_refused(result: Result, *parts: object) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for part in parts:
        assert str(part) in result.stderr


def test_the_version_is_the_packages() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"patrickstar {patrickstar.__version__}\n")


def test_help_names_the_command_and_its_options() -> None:
    assert "train" in run("--help").stdout
    listed = run("train", "--help").stdout
    for option in ("--device-memory", "--activation-offload", "--no-activation-checkpointing", "--traceback"):
        assert option in listed


def test_the_module_runs_as_the_command() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "patrickstar", "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout == f"patrickstar {patrickstar.__version__}\n"


def test_misspelt_options_and_commands_are_named_with_the_nearest() -> None:
    assert_refused(train("--stpes", 3), "--stpes", "--steps")
    assert_refused(run("trian"), "trian", "train")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", 0),
        ("--batch", -1),
        ("--vocab-size", 100),
        ("--precision", "bf17"),
        ("--device", "tpu"),
        ("--lr", "fast"),
    ],
)
def test_values_out_of_range_are_named(arguments: tuple[object, ...]) -> None:
    assert_refused(train(*arguments), arguments[0])


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory", "--chunk-size"])
def test_a_size_that_is_none_is_named(option: str) -> None:
    name = option.removeprefix("--").replace("-", "_")
    assert_refused(train(option, "2 gigs"), name, "'2 gigs' is not a size")


def test_missing_data_is_named(tmp_path: Path) -> None:
    assert_refused(
        train("--model", "gpt-1m", "--data", tmp_path / "nowhere"),
        f"error: there is no file or folder {tmp_path / 'nowhere'}",
    )


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    assert_refused(train("--model", "gpt-1n"), "'gpt-1n'", "did you mean gpt-1m?")


def test_a_sequence_longer_than_the_models_is_refused(text: Path) -> None:
    assert_refused(train("--data", text, "--sequence", 1025), "1024 or less instead of 1025")


def test_too_little_text_is_told(text: Path) -> None:
    text.write_text("short")
    assert_refused(train("--data", text, "--model", "gpt-1m"), "less than one sequence of 256")


def test_a_log_that_cannot_be_written_is_named(text: Path, tmp_path: Path) -> None:
    log = tmp_path / "text.py" / "log.jsonl"
    assert_refused(train("--model", "gpt-1m", "--data", text, "--log", log), log, "choose another path")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_told(text: Path) -> None:
    assert_refused(run("train", "--data", text, "--device", "cuda"), "'cuda' is not available")


def test_a_budget_too_small_says_what_works(text: Path) -> None:
    result = train("--data", text, "--model", "gpt-1m", "--device-memory", "1KiB", "--sequence", 16)
    assert_refused(result, "device budget of 1024 bytes", "Each of these alone is enough", "device_memory='")


@pytest.mark.skipif(psutil.virtual_memory().total > 150 << 30, reason="needs a machine without room for gpt-12b")
def test_a_model_that_no_memory_here_holds_is_refused_before_its_libraries_load(text: Path) -> None:
    program = (
        "import sys\nfrom patrickstar.__main__ import main\ntry:\n    main()\nfinally:\n"
        "    print('transformers' in sys.modules)"
    )
    options = ["--data", text, "--model", "gpt-12b", "--device", "cpu", "--device-memory", "3GiB"]
    command = [sys.executable, "-c", program, "train", *map(str, options), "--host-memory", "4GiB"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "169159065600 bytes (157.54 GiB) of model data" in done.stderr and "--disk DIRECTORY" in done.stderr
    assert done.stdout == "False\n"


def test_a_traceback_shows_when_it_is_asked_for(tmp_path: Path) -> None:
    result = train("--model", "gpt-1m", "--data", tmp_path / "nowhere", "--traceback")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "open_corpus" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BudgetError("too small"), 2, "error: too small\n"),
        (ValueError("odd"), 1, "internal error: ValueError: odd; this is a bug, --traceback shows where\n"),
        (KeyboardInterrupt(), 130, "interrupted before the first step was done\n"),
    ],
)
def test_every_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("patrickstar._cli.train.train", fail)
    result = train()
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from patrickstar.__main__ import main; main()"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr == "the command line needs typer: pip install 'patrickstar[cli]'\n"
