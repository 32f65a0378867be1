"""Commands of the documentation have programs, options, files and targets that exist."""

from pathlib import Path

import pytest

from .pages import PAGES, blocks, commands
from .shell import check


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path):
    for block in blocks(page):
        for command in commands(block) if block.language == "sh" and not block.not_run else ():
            check(command)
