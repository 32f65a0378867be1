"""Every Python block of the documentation runs, page by page, and prints what the page says."""

import gc
import re
import warnings
from pathlib import Path

import pytest
import torch
from sampling import nightly

from patrickstar._plan import search

from .downloads import DOWNLOADS
from .pages import DOCS, LANGUAGES, PAGES, Block, blocks, commands, matches
from .shell import run_report

# Pages show what users write, whose libraries may warn; this package may not.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:::patrickstar"),
    # Budgets of pages are those of the reader's machine.
    pytest.mark.filterwarnings("ignore:.*of memory are available here:UserWarning"),
]

WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run a page in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    if not nightly():
        monkeypatch.setattr("patrickstar._plan.planner.BATCHES", (4,))  # of 8: plans search all
        largest = search.largest_batch  # batches are traced, and that of a tiny model is a million
        monkeypatch.setattr(search, "largest_batch", lambda *arguments: largest(*arguments[:4], below=3))
        monkeypatch.setattr("patrickstar._dry_run.host_costs.LAYERS", 5)
    gc.collect()  # tensors of other tests would count, and budgets of pages are small
    return tmp_path


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    if page.stem in DOWNLOADS:
        DOWNLOADS[page.stem](folder)
    namespace: dict[str, object] = {"__name__": "__main__"}
    capsys.readouterr()
    printed = None
    for block in blocks(page):
        if block.not_run:
            printed = None
        elif block.language == "python":
            run(block, namespace)
            printed = capsys.readouterr().out
        elif block.language == "sh":
            for command in commands(block):
                run_report(command)
            printed = None
            capsys.readouterr()
        elif block.language == "text" and block.follows and printed is not None:
            assert matches(block.code, printed), f"{block.name}: the page says\n{block.code}\nand it prints\n{printed}"


def run(block: Block, namespace: dict[str, object]) -> None:
    """Run a block of Python. Line numbers in tracebacks are those of the page."""
    exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), namespace)


def test_outputs_are_compared():
    assert matches("loss …\nend", "loss 3.2\nend\n")
    assert not matches("loss …\nend", "loss 3.2\n4\nend")
    assert not matches("a.b", "aXb")


def test_each_block_has_a_language_that_is_checked():
    every = [block for page in PAGES for block in blocks(page)]
    wrong = [f"{block.name}: {block.language or 'none'}" for block in every if block.language not in LANGUAGES]
    assert not wrong, f"blocks of languages other than {', '.join(sorted(LANGUAGES))}: {wrong}"


def test_each_download_has_its_page():
    assert DOWNLOADS.keys() <= {page.stem for page in WITH_CODE}
    assert (DOCS / "tutorial.md") in WITH_CODE


def test_no_page_uses_a_name_that_transformers_deprecates():
    """Libraries use such names themselves, so that their warnings do not tell."""
    codes = {block.name: block.code for page in WITH_CODE for block in blocks(page) if block.language == "python"}
    assert not [name for name, code in codes.items() if re.search(r"[.(,\s]gradient_checkpointing\w*[(=]", code)]


def test_warnings_of_this_package_are_errors():
    with pytest.raises(UserWarning, match="noticed"):
        exec(compile("import warnings\nwarnings.warn('noticed')", "x", "exec"), {"__name__": "patrickstar.x"})
    warnings.warn("a library's", stacklevel=1)
