"""Law: beside an accelerator, whose work is late, lock-free updates give the bits of their log."""

import random
from functools import partial

import pytest
import strict_device
from laws.test_late_copies import some_are_slow
from lock_free_cases import (
    IN_MEMORY,
    STEPS,
    USUAL,
    config_of,
    engine_with,
    let_chances_pass,
    on_disk,
    run_random,
    run_three,
)
from speculation_cases import loop, step

import patrickstar as ps
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.lock_free_update import LockFreeUpdates


def compare(script, seed, folder, **options):
    strict_device.configure(seed=seed)
    return run_three(script, folder, device="strict", **options)


@pytest.mark.parametrize("device_memory", [0.5, 1.6, 20], ids=["half of the parameters fit", "all fit", "states fit"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_run_replay_and_reference_agree_in_memory(device_memory, backwards, monkeypatch, tmp_path):
    let_chances_pass(monkeypatch, 0.5)
    script = loop([[]] * STEPS, [backwards] * STEPS)
    stats = compare(script, 1, tmp_path, chunk_size="6KiB", device_memory=device_memory, **IN_MEMORY)
    assert stats.peak_staleness <= 4 and (stats.staleness > 0 or device_memory == 20)


class NotBegun:
    """Update that begins when it is waited for."""

    label = "an update that has not begun"

    done = False

    def __init__(self, start):
        self._start = start

    def prioritize(self):
        pass

    def withdraw(self):
        return True

    def cancel(self):
        pass

    def wait(self):
        self._start().wait()


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_updates_that_have_not_begun_are_put_off_until_they_are_overdue(max_staleness, monkeypatch, tmp_path):
    start = HostUpdates.start
    monkeypatch.setattr(HostUpdates, "start", lambda *args: NotBegun(partial(start, *args)))
    stats = compare(USUAL, 4, tmp_path, max_staleness=max_staleness, chunk_size="6KiB", **IN_MEMORY)
    assert stats.peak_staleness == max_staleness


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_run_replay_and_reference_agree_from_disk(share, monkeypatch, tmp_path):
    let_chances_pass(monkeypatch, share)
    stats = compare(USUAL, 2, tmp_path, replayed=IN_MEMORY, **on_disk(tmp_path))
    assert stats.disk_write_bytes > 0 and stats.staleness > 0 and stats.peak_staleness <= 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)), 3])
def test_no_page_is_updated_while_gradients_are_added(seed, monkeypatch, tmp_path):
    """Beside the pages for which a step waits others may have begun."""
    let_chances_pass(monkeypatch, 1.0)
    monkeypatch.setattr(LockFreeUpdates, "_is_overdue", lambda self, page, step: page.number in (0, seed))
    accept, calls = LockFreeUpdates.accept, 0

    def checked(self, *args):
        nonlocal calls
        calls += 1
        assert not self._updates.queue.runs(on_disk=True), "a page is being updated"
        accept(self, *args)

    monkeypatch.setattr(LockFreeUpdates, "accept", checked)
    compare(USUAL, seed, tmp_path, max_staleness=9, **on_disk(tmp_path) | dict(chunk_size="40KiB"))
    assert calls


def test_gradients_are_copied_to_the_host_in_their_own_dtype(tmp_path):
    strict_device.configure(seed=6)
    config = config_of(ps.LockFree(after=1), device="strict", device_memory=20, **IN_MEMORY)
    with engine_with(config) as engine:
        for number in range(3):
            step(engine, number)
        gradients = sum(2 * param.numel() for param in engine.module.parameters())
        assert engine.stats.last.d2h_bytes <= 2 * gradients  # newest parameters of states on the device, too


@pytest.mark.parametrize("room", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("seeds", some_are_slow(100, fast=4))
def test_random_loops(seeds, room, monkeypatch, tmp_path):
    tested = 0
    for seed in seeds:
        strict_device.configure(seed=seed)
        let_chances_pass(monkeypatch, random.Random(seed).choice([0.0, 0.5, 0.9, 1.0]), seed)
        tested += run_random(seed, tmp_path, device="strict", **({} if room else IN_MEMORY))
    assert tested > len(seeds) // 4


def test_room_for_its_buffers_may_be_made_with_the_parameters_of_a_chunk(tmp_path):
    """Their values are written where the chunk is by then: on disk."""
    strict_device.configure(seed=3)
    assert run_random(3, tmp_path, device="strict")
