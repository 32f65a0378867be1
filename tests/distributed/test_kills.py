"""Kills at random moments: the newest checkpoint is complete, and the resumed run has the bits of one without kills."""

import pytest
from sampling import draws

from .kills import check_kills


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_few_kills(size):
    check_kills(count=draws(4), processes=size, seed=1, steps=draws(24))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_two_hundred_kills(size):
    check_kills(count=100, processes=size, seed=2, steps=24)
