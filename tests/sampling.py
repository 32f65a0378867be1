"""Sizes of tests: `make test` runs a quarter of the random draws and one precision and budget per case.

`make nightly` runs all.
"""

import pytest
from hypothesis import settings

NIGHTLY = "nightly"
"""Hypothesis profile of `make nightly`."""
FAST_SHARE = 4
THINNED = ("precision", "ending", "room")
"""Parameters of tests of which `make test` runs one value per case."""

# No deadlines: a test must not fail because the machine is busy.
settings.register_profile(NIGHTLY, print_blob=True, deadline=None)
settings.register_profile("fast", deadline=None)
settings.load_profile("fast")


def nightly() -> bool:
    """Return True in `make nightly`."""
    return settings.get_current_profile_name() == NIGHTLY


def draws(count: int) -> int:
    """Return how many of `count` random cases run: all of them nightly, otherwise a quarter, but at least one."""
    return count if nightly() else -(-count // FAST_SHARE)


def one_value_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items with one value of the thinned parameters for each case, by turns, so that all values remain.

    A case is a test function with its other parameters.
    """
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        others = tuple(sorted((name, str(value)) for name, value in params.items() if name not in THINNED))
        cases.setdefault((item.nodeid.split("[")[0], others), []).append(item)
    return [case[number % len(case)] for number, case in enumerate(cases.values())]
