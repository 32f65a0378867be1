"""Every Python block of the documentation runs, page by page, and prints what the page says."""

import gc
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from sampling import nightly

import patrickstar as ps
from patrickstar._plan import search

from .pages import DOCS, LANGUAGES, PAGES, SETUPS, Block, blocks, commands
from .shell import run_report

# Pages show what users write, whose libraries may warn; this package may not.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:::patrickstar"),
    # Budgets of pages are those of the reader's machine.
    pytest.mark.filterwarnings("ignore:.*of memory are available here:UserWarning"),
]

WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
SMALLER = {"llama-3.2-1b": "gpt-10m"}
"""Models of pages that take long to plan, and those that `make test` plans in their place."""
DIRECTORIES = ("/scratch", "/nvme", "/fast/disk")
"""Directories of pages, in place of which a temporary one is used."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run a page in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    if not nightly():
        monkeypatch.setattr("patrickstar._plan.planner.BATCHES", (4, 16))  # of 8: plans search all
        few = partial(search.largest_batch, below=8)  # each batch is traced, and that of a tiny model is a million
        monkeypatch.setattr(search, "largest_batch", few)
    gc.collect()  # tensors of other tests would count, and budgets of pages are small
    return tmp_path


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    namespace = {"__name__": "__main__", "ps": ps}
    setup = SETUPS / f"{page.stem.replace('-', '_')}.py"
    if setup.exists():
        exec(compile(setup.read_text(), setup, "exec"), namespace)
    capsys.readouterr()
    printed = None
    for block in blocks(page):
        if block.not_run:
            printed = None
        elif block.language == "python":
            run(block, namespace, folder)
            printed = capsys.readouterr().out
        elif block.language == "sh":
            for command in commands(block):
                run_report(command)
            printed = None
            capsys.readouterr()
        elif block.language == "text" and block.follows and printed is not None:
            assert matches(block.code, printed), f"{block.name}: the page says\n{block.code}\nand it prints\n{printed}"


def run(block: Block, namespace: dict[str, object], directory: Path) -> None:
    """Run a block of Python. Line numbers in tracebacks are those of the page."""
    code = block.code
    for name in DIRECTORIES:
        code = code.replace(f'"{name}"', repr(str(directory)))
    for name, smaller in ({} if nightly() else SMALLER).items():
        code = code.replace(f'"{name}"', repr(smaller))
    exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), namespace)


def matches(expected: str, found: str) -> bool:
    """Return whether a text is the expected one, in which "…" stands for anything within a line."""
    pattern = "[^\n]*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, found.strip()) is not None


def test_outputs_are_compared():
    assert matches("loss …\nend", "loss 3.2\nend\n")
    assert not matches("loss …\nend", "loss 3.2\n4\nend")
    assert not matches("a.b", "aXb")


def test_each_block_has_a_language_that_is_checked():
    every = [block for page in PAGES for block in blocks(page)]
    wrong = [f"{block.name}: {block.language or 'none'}" for block in every if block.language not in LANGUAGES]
    assert not wrong, f"blocks of languages other than {', '.join(sorted(LANGUAGES))}: {wrong}"


def test_each_setup_has_its_page():
    stems = {page.stem.replace("-", "_") for page in PAGES}
    assert {path.stem for path in SETUPS.glob("*.py")} <= stems
    assert (DOCS / "tutorial.md") in WITH_CODE


def test_warnings_of_this_package_are_errors():
    with pytest.raises(UserWarning, match="noticed"):
        exec(compile("import warnings\nwarnings.warn('noticed')", "x", "exec"), {"__name__": "patrickstar.x"})
    warnings.warn("a library's", stacklevel=1)
