"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest
from command_line import change_to
from fixed_machine import same_machine  # noqa: F401


@pytest.fixture
def small_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary directory with a text, a model and a cache of its own; nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "300")  # boxes around usage errors are as wide as the terminal
    change_to(tmp_path, monkeypatch)
