"""Combinations of which `make test` runs a part."""

from itertools import combinations, product

import pytest
import sampling


class Item:
    """Stand-in for a test with one value of each parameter."""

    nodeid = "tests/test_some.py::test_some[...]"

    def __init__(self, mark, **params):
        self.mark, self.callspec, self.params = mark, self, params

    def get_closest_marker(self, name):
        return self.mark if name == self.mark else None


def items(mark, **values):
    return [Item(mark, **dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 2, 2), (5, 4, 4)])
def test_every_two_values_meet_in_the_fast_run(sizes):
    every = items("pairwise", **{f"p{number}": range(size) for number, size in enumerate(sizes)})

    def pairs(some):
        return {pair for item in some for pair in combinations(item.params.items(), 2)}

    selected = sampling.fast(every)
    assert pairs(selected) == pairs(every)
    assert len(selected) <= len(every) * 3 // 4 or len(sizes) == 2


def test_a_test_of_one_parameter_runs_with_all_its_values():
    every = items("pairwise", only="abc")
    assert sampling.fast(every) == every


def test_one_value_of_the_thinned_parameters_for_each_case_by_turns():
    every = items("", precision=["bf16", "fp32"], case="abcd")
    selected = sampling.fast(every)
    assert sorted(item.params["case"] for item in selected) == list("abcd")
    assert {item.params["precision"] for item in selected} == {"bf16", "fp32"}
