"""Recorded runs: the same bits as plain PyTorch, and the same bytes moved as before, over tiers and policies."""

import json

import pytest

from .recorded_runs import RECORD, RUNS, Run

FAST = (3, 7, 12, 21)


NUMBERS = [pytest.param(number, marks=() if number in FAST else pytest.mark.slow) for number in range(RUNS)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_run_decides_as_when_it_was_recorded(number):
    assert Run(number).decisions() == json.loads(RECORD.read_text())[number]
