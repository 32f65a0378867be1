"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def small_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary directory with a small text, `text.py`, and a cache of its own; nothing is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("text.py").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(200)))
