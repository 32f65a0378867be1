"""Check the commands of shell blocks: their programs, options, files and targets exist."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from typer.main import get_command

from patrickstar._cli.main import app

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = ("my_script.py", "script.py")
"""Scripts of the reader."""


def check(command: str) -> None:
    """Raise an error if a command is not one that the reader could run."""
    words = [word for word in shlex.split(command) if word != "..."]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)  # a variable of the environment
    program, arguments = words[0], words[1:]
    CHECKS[program](arguments)


def _patrickstar(arguments: list[str]) -> None:
    root: Any = get_command(app)
    name, rest = arguments[0], arguments[1:]
    if name.startswith("-"):
        root.make_context("patrickstar", arguments, resilient_parsing=True)
        return
    assert name in root.commands, f"patrickstar has no command {name}"
    for option in rest:
        known = {flag for param in root.commands[name].params for flag in (*param.opts, *param.secondary_opts)}
        assert not option.startswith("--") or option.partition("=")[0] in {*known, "--help"}, f"{name} has no {option}"
    if "--help" not in rest:
        root.commands[name].make_context(name, list(rest))


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    if parsed.module:
        assert parsed.training_script == "patrickstar"
        _patrickstar(parsed.training_script_args)
    else:
        _script(parsed.training_script)


def _python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        _script(arguments[0])


def _script(path: str) -> None:
    assert path in PLACEHOLDERS or (ROOT / path).is_file(), f"there is no {path}"


def _make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in arguments:
        assert "=" in target or re.search(rf"^{target}:", makefile, re.M), f"make has no target {target}"


def _pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    groups = [group for word in arguments for group in re.findall(r"\[(.+)\]", word)]
    named = {extra.strip() for group in groups for extra in group.split(",")}
    assert named <= extras.keys(), f"there are no extras {named - extras.keys()}"


CHECKS = {"patrickstar": _patrickstar, "torchrun": _torchrun, "python": _python, "make": _make, "pip": _pip}
CHECKS |= dict.fromkeys(("git", "cd", "tensorboard"), lambda arguments: None)


def run_report(command: str) -> None:
    """Run `patrickstar report` on a log that the blocks before it have written."""
    words = shlex.split(command)
    if words[:2] == ["patrickstar", "report"] and Path(words[2]).exists():
        app(words[1:], standalone_mode=False)
