"""Law: updates from disk that backward starts before the step has decided never change a bit."""

import logging
from pathlib import Path

import pytest
import speculation_cases as cases
from seeded import engine_of
from speculation_cases import EVENTS, build, clip_nothing, compare, loop, run

import patrickstar as ps
from patrickstar._step.disk_speculation import DiskSpeculation
from patrickstar._step.staging_pool import PageSet

from .test_late_copies import some_are_slow
from .tiers import check_a_killed_run


def wait_for_reads(pages):
    for read in pages.reads:
        read.wait()
    return len(pages.reads) == len(pages.lists)


def new_end_step(speculation, confident, end_step=DiskSpeculation.end_step):
    end_step(speculation, confident)
    speculation._limit = 99


@pytest.fixture
def fast_disk(monkeypatch):
    """Wait for reads before operators, so that all pages are updated before the step, though none was late."""
    monkeypatch.setattr(PageSet, "ready", property(wait_for_reads))
    monkeypatch.setattr(DiskSpeculation, "end_step", new_end_step)


def test_updates_from_disk_that_the_step_confirms_are_committed(tmp_path, fast_disk):
    stats = compare(loop([[clip_nothing]] * 8, [1] * 8), device="cpu", **cases.on_disk(tmp_path))
    assert stats.speculation_hits > 0


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_before_the_step_is_seen(event, tmp_path, fast_disk):
    script = loop([[]] * 3 + [[event], [], [], [event], []], [1] * 8)
    assert compare(script, device="cpu", **cases.on_disk(tmp_path)).speculated > 0


def test_a_disk_without_room_for_spare_pages_is_no_error(tmp_path, caplog, fast_disk):
    needed = 308 << 10
    with caplog.at_level(logging.WARNING, "patrickstar"):
        stats = compare(loop([[]] * 6, [1] * 6), device="cpu", **cases.on_disk(tmp_path, capacity=needed))
    assert stats.speculated == 0 and stats.disk_bytes <= needed
    said = [record for record in caplog.records if "wait for the optimizer step" in record.message]
    assert len(said) == 1


def trained(folder: Path, first: int, last: int, saves: bool = False) -> ps.Engine:
    """Train, waiting for reads from disk if steps are saved."""
    if saves:
        PageSet.ready, DiskSpeculation.end_step = property(wait_for_reads), new_end_step
    memory = {"device_memory": "72KiB", "host_memory": "170KiB", "disk": ps.Disk(folder)}
    engine = engine_of(
        build, ps.Config(device="cpu", precision="bf16", chunk_size="18KiB", **memory), page_bytes=8192, poison=False
    )
    return cases.trained(engine, folder, first, last, saves)


def test_a_run_killed_beside_speculative_updates_resumes_with_the_same_bits(tmp_path):
    check_a_killed_run(trained, tmp_path, lambda step, speculated: step >= 6 and speculated > 0)


@pytest.mark.parametrize("seeds", some_are_slow(100, fast=5))
def test_no_order_of_events_changes_a_bit(seeds, tmp_path, fast_disk):
    stats = [
        run(seed, device="cpu", disk=ps.Disk(tmp_path), host_memory=f"{140 + seed % 5 * 15}KiB", device_memory=2.5)
        for seed in seeds
    ]
    assert sum(each.steps > 0 for each in stats) > len(seeds) // 2
    assert sum(each.speculated for each in stats) > 0, f"nothing was updated early in {seeds}"
