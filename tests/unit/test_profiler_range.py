"""Ranges of the profiler."""

from patrickstar._hardware.profiler_range import profiler_range


def test_without_a_profiler_a_range_costs_nothing():
    assert profiler_range("fetch", object()) is profiler_range("evict", object())
