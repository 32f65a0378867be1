"""Commands of the documentation have programs, options, files and targets that exist."""

import pytest

from .pages import PAGES, Block, blocks, commands
from .shell import check

SHELL = [block for page in PAGES for block in blocks(page) if block.language == "sh" and not block.not_run]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_commands_exist(block: Block):
    for command in commands(block):
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
