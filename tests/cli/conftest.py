"""Fixtures of the command line's tests."""

import json
from pathlib import Path

import pytest
from command_line import CONFIG, TEXT
from fixed_machine import same_machine  # noqa: F401


@pytest.fixture
def small_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary directory with a text, a model and a cache of its own; nothing is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "300")  # boxes around usage errors are as wide as the terminal
    monkeypatch.chdir(tmp_path)
    Path("text.py").write_text(TEXT)
    Path("model.json").write_text(json.dumps(CONFIG))
