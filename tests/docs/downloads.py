"""Models that a reader of a page downloads: tiny ones, in folders of the names that the page has."""

from collections.abc import Callable
from pathlib import Path

from integrations.tiny import OF_WORDS, letters, llama


def _qwen(folder: Path) -> None:
    llama(**OF_WORDS).save_pretrained(folder / "Qwen" / "Qwen3-0.6B")
    letters().save_pretrained(folder / "Qwen" / "Qwen3-0.6B")


DOWNLOADS: dict[str, Callable[[Path], None]] = {"trl": _qwen}
"""Functions that write them into a folder, by page."""
