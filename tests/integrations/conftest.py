"""What every test of an integration may rely on: nothing is fetched, tiny tensors stay on one thread."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # which the library reads when it is imported


@pytest.fixture(autouse=True)
def _alone(one_thread):
    return one_thread
