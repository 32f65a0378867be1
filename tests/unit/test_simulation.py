"""Copies of models for dry runs, and the number of steps of one."""

import pytest
from torch import nn

from patrickstar._dry_run.simulation import MAX_STEPS, _enough_steps, copy_to_meta
from patrickstar._step.stats import StepStats


def test_a_meta_copy_keeps_ties_and_frozen_parameters():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    copied = copy_to_meta(model)
    assert copied["b"].weight is copied["a"].weight and copied["a"].weight.is_meta
    assert not copied["a"].bias.requires_grad and copied["b"].bias.requires_grad
    assert not model["a"].weight.is_meta


@pytest.mark.parametrize(
    ("moved", "left", "enough"),
    [
        ([1, 1], [0.0, 0.0], False),
        ([1, 2, 2], [0.0, 3.0, 3.0], True),
        ([1, 2, 2], [0.0, 3.0, 1.0], True),
        ([1, 2, 2], [0.0, 1.0, 3.0], False),
        ([1, 2, 3], [0.0, 0.0, 0.0], False),
        (list(range(MAX_STEPS)), [0.0] * MAX_STEPS, True),
    ],
)
def test_a_dry_run_ends_once_steps_move_the_same_and_leave_no_more_work(moved, left, enough):
    history = [StepStats(h2d_bytes=nbytes) for nbytes in moved]
    assert _enough_steps(history, left, None) == enough
    assert _enough_steps(history, left, len(moved)) and not _enough_steps(history, left, len(moved) + 1)
