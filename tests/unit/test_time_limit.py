"""Limit on the time of a run: `patrickstar train --minutes`."""

import math

from patrickstar._cli.time_limit import TimeLimit


def test_a_run_ends_before_a_step_that_would_not_fit_and_never_without_a_limit():
    now = [100.0]
    limit = TimeLimit(2, lambda: now[0])
    assert limit.left_s == 120
    now[0] += 100
    assert limit.left_s == 20 and not limit.is_due(20) and limit.is_due(20.5)
    now[0] += 60
    assert limit.left_s == -40 and limit.is_due(0.0)
    assert TimeLimit(None).left_s == math.inf and not TimeLimit(None).is_due(1e9)
