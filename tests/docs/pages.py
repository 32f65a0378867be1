"""Code blocks of the documentation's pages, with what their comments say about running them."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LANGUAGES = {"python", "sh", "toml", "text"}
"""Languages of blocks. `text` directly below a block of Python is what that prints; elsewhere it is not checked."""
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Number of its first line of code, from 1."""
    language: str
    code: str
    not_run: str
    """Reason why it isn't run, from a comment before it; empty if it is run."""
    follows: bool
    """True if it lies directly below another block."""

    @property
    def name(self) -> str:
        """Name for messages, such as docs/trainer.md:12."""
        return f"docs/{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    not_run, opened, language, follows = "", 0, "", False
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("```") and not opened:
            opened, language = number, line.removeprefix("```")
        elif line == "```":
            code = "\n".join(lines[opened : number - 1])
            found.append(Block(page, opened + 1, language, code, not_run, follows))
            opened, not_run, follows = 0, "", True
        elif not opened and line.strip():
            reason = NOT_RUN.fullmatch(line)
            not_run, follows = reason[1] if reason else "", False
    assert not opened, f"docs/{page.name}:{opened}: the block has no end"
    return found


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block, each on one line, without comments."""
    joined = re.sub(r"\\\n\s*", "", block.code)
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def matches(expected: str, found: str) -> bool:
    """Return whether a text is the expected one, in which "…" stands for anything within a line."""
    pattern = "[^\n]*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, found.strip()) is not None
