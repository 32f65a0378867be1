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


@pytest.mark.parametrize(
    "command",
    [
        "patrickstar tain --model gpt-10m",
        "patrickstar train --modle gpt-10m",
        "patrickstar train --steps many",
        "torchrun --nproc-per-node 2 -m patrickstar train --device-mem 1GiB",
        "torchrun --nproc-per-node 2 examples/missing.py",
        "make everything",
        "pip install '.[everything]'",
        "rm -rf folder",
    ],
)
def test_a_wrong_command_is_found(command: str):
    with pytest.raises(BaseException, match=r"."):
        check(command)
