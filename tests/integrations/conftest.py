"""What every test of an integration may rely on: nothing is fetched, tiny tensors stay on one thread."""

import pytest


@pytest.fixture(autouse=True)
def _alone(one_thread, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
