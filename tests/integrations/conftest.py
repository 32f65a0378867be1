"""Settings for integration tests: no downloads, one thread."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads this at import


@pytest.fixture(autouse=True)
def _alone(one_thread):
    return one_thread
