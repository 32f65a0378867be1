"""Calls of the command line in this process, and the small model and text that they train."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from patrickstar._cli.main import app
from patrickstar._hardware.cpu_allocator import native_library

CONFIG = dict(model_type="gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=300)
CONFIG |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(200))
SMALL = ["--model", "model.json", "--data", "text.py", "--sequence", 16, "--batch", 2, "--device", "cpu"]
SMALL += ["--lr", "1e-2", "--log", "log.jsonl"]
"""Options of a run in the directory of the fixture `small_text`. Later options win over these."""


def change_to(folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Change to a folder with the text, a model with these options, and a cache of its own."""
    native_library()  # with another cache it would be compiled anew
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.chdir(folder)
    Path("text.py").write_text(TEXT)
    Path("model.json").write_text(json.dumps(CONFIG | options))


def call(command: str, *words: object) -> Result:
    return CliRunner().invoke(app, [command, *map(str, words)])


def done(command: str, *words: object) -> Result:
    """Call a command, and assert that it succeeded."""
    result = call(command, *words)
    assert result.exit_code == 0, result.output
    return result


train, trained = partial(call, "train", *SMALL), partial(done, "train", *SMALL)
plan = partial(call, "plan", "--no-dry-run")
"""Plans that are estimated only: a dry run takes seconds."""


def planned(*words: object) -> dict[str, Any]:
    """Return such a plan as plain data."""
    return json.loads(done("plan", "--no-dry-run", "--json", *words).output)


def assert_refused(result: Result, *parts: object) -> None:
    """Assert that a command ended with a usage error or an error in one line, with these parts."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for part in parts:
        assert str(part) in result.stderr, result.stderr


def assert_told(result: Result, *parts: object) -> None:
    """Assert that a command was refused in one line."""
    assert_refused(result, *parts)
    assert result.stderr.count("\n") == 1, result.stderr


def read_log(*kinds: str, log: str = "log.jsonl") -> list[dict[str, Any]]:
    """Return the lines of these kinds, by default those of steps and the summary."""
    lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
    return [line for line in lines if line["kind"] in (kinds or ("step", "summary"))]
