"""Random order of tests, to find those that need another one before them."""

import random
from collections.abc import Iterator

import pytest


class RandomOrder:
    """Plugin that runs files in random order, and the tests of each file, too.

    Files remain together, because they share fixtures.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def pytest_report_header(self) -> str:
        return f"random order: seed {self.seed}"

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        order = random.Random(self.seed)
        places = {path: order.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], order.random()))
