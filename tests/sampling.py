"""Sizes of tests: `make test` runs a sixth of the random draws and one precision and budget per case.

Of the combinations of a test marked `pairwise` it runs some in which every two values of parameters meet.
`make nightly` runs all.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings

NIGHTLY = "nightly"
"""Hypothesis profile of `make nightly`."""
FAST_SHARE = 6
THINNED = ("precision", "ending", "room", "recomputing", "without_grad", "compiling", "some_optimizer")
"""Parameters of tests of which `make test` runs one value per case."""

# No deadlines: a test must not fail because the machine is busy.
settings.register_profile(NIGHTLY, print_blob=True, deadline=None)
settings.register_profile("fast", deadline=None, max_examples=-(-settings.default.max_examples // FAST_SHARE))
settings.load_profile("fast")


def nightly() -> bool:
    """Return True in `make nightly`."""
    return settings.get_current_profile_name() == NIGHTLY


def draws(count: int) -> int:
    """Return how many of `count` random cases run: all of them nightly, otherwise a sixth, but at least one."""
    return count if nightly() else -(-count // FAST_SHARE)


def drawn(count: int, *strategies: Any, fast: int | None = None, **named: Any) -> Callable[[Any], Any]:
    """Return hypothesis' `given` with `count` draws in `make nightly`; `fast` in `make test`, by default a sixth."""
    chosen = settings(max_examples=count if nightly() else fast or draws(count), print_blob=True)
    return lambda test: chosen(given(*strategies, **named)(test))


def fixed_draws(count: int) -> Callable[..., Any]:
    """Return hypothesis' `given` with so many draws, thinned as by `draws`, and the same in every run."""
    chosen = settings(derandomize=True, max_examples=draws(count))
    return lambda *strategies: lambda test: chosen(given(*strategies)(test))


def fast(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that `make test` runs, in their order."""
    pairwise: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise") is not None:
            pairwise.setdefault(item.nodeid.split("[")[0], []).append(item)
    in_pairs = {item for group in pairwise.values() for item in group}
    selected = set(one_value_each([item for item in items if item not in in_pairs]))
    for group in pairwise.values():
        selected.update(every_pair(group))
    return [item for item in items if item in selected]


def every_pair(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return items of one test in which all pairs of its parameters' values occur that occur in any item."""
    pairs = {item: set(combinations(sorted(_values(item).items()), 2)) for item in items}
    selected, missing = [], set().union(*pairs.values())
    while missing:
        best = max(items, key=lambda item: len(pairs[item] & missing))
        selected.append(best)
        missing -= pairs[best]
    return selected or items


def _values(item: pytest.Item) -> dict[str, str]:
    """Return the values of an item's parameters, as text."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: str(value) for name, value in params.items()}


def one_value_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items with one value of the thinned parameters for each case, by turns, so that all values remain.

    A case is a test function with its other parameters.
    """
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        others = tuple(sorted((name, value) for name, value in _values(item).items() if name not in THINNED))
        cases.setdefault((item.nodeid.split("[")[0], others), []).append(item)
    return [case[number % len(case)] for number, case in enumerate(cases.values())]
