"""Law: updates from disk that backward starts before the step has decided never change a bit."""

import logging

import pytest
from speculation_cases import EVENTS, clip_nothing, compare, loop, run

import patrickstar as ps

from .test_late_copies import some_are_slow

RUNS_PER_TEST = 10


def budgets(tmp_path, **disk):
    return dict(chunk_size="18KiB", device_memory=2.0, host_memory="170KiB", disk=ps.Disk(tmp_path, **disk))


def test_updates_from_disk_that_the_step_confirms_are_committed(tmp_path):
    stats = compare(loop([[clip_nothing]] * 8, [1] * 8), device="cpu", **budgets(tmp_path))
    assert stats.speculation_hits > 0


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_before_the_step_is_seen(event, tmp_path):
    script = loop([[]] * 3 + [[event], [], [], [event], []], [1] * 8)
    assert compare(script, device="cpu", **budgets(tmp_path)).speculated > 0


def test_a_disk_without_room_for_spare_pages_is_no_error(tmp_path, caplog):
    needed = 308 << 10
    with caplog.at_level(logging.WARNING, "patrickstar"):
        stats = compare(loop([[]] * 6, [1] * 6), device="cpu", **budgets(tmp_path, capacity=needed))
    assert stats.speculated == 0 and stats.disk_bytes <= needed
    said = [record for record in caplog.records if "wait for the optimizer step" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("first", some_are_slow(100, fast=10))
def test_no_order_of_events_changes_a_bit(first, tmp_path):
    stats = [
        run(seed, device="cpu", disk=ps.Disk(tmp_path), host_memory=f"{140 + seed % 5 * 15}KiB", device_memory=2.5)
        for seed in range(first, first + RUNS_PER_TEST)
    ]
    assert sum(each.steps > 0 for each in stats) > RUNS_PER_TEST // 2
    assert sum(each.speculated for each in stats) > 0, f"nothing speculated from seed {first} on"
