"""Law: beside an accelerator, whose work is late, delayed updates give the bits of their recurrence."""

import random

import pytest
import speculation_cases as cases
import strict_device
from laws.test_late_copies import some_are_slow
from speculation_cases import DELAYED_EVENTS, loop

import patrickstar as ps

STEPS = 6


def compare(script, seed, after=0, **options):
    strict_device.configure(seed=seed)
    return cases.compare(script, device="strict", update=ps.Delayed(after=after), **options)


@pytest.mark.parametrize("device_memory", [0.5, 1.6, 20], ids=["half of the parameters fit", "all fit", "states fit"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_the_bits_are_those_of_the_reference(device_memory, backwards):
    script = loop([[]] * STEPS, [backwards] * STEPS)
    compare(script, 1, after=2, chunk_size="6KiB", host_memory="4MiB", device_memory=device_memory)


def test_the_bits_are_those_of_the_reference_from_disk(tmp_path):
    options = dict(chunk_size="18KiB", device_memory=2.0, host_memory="200KiB", disk=ps.Disk(tmp_path))
    stats = compare(loop([[]] * STEPS, [1] * STEPS), 2, **options)
    assert stats.disk_write_bytes > 0


@pytest.mark.parametrize("event", DELAYED_EVENTS[1:])
@pytest.mark.parametrize("room", [False, True], ids=["planned", "evicted at every access"])
def test_whatever_happens_before_the_step_is_as_in_the_reference(event, room):
    options = dict(chunk_size="6KiB", host_memory="4MiB", device_memory=0.7, evict_everything=room)
    compare(loop([[]] * 2 + [[event], [], [event], []], [1] * 6), 3, **options)


@pytest.mark.parametrize("room", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("seeds", some_are_slow(100, fast=10))
def test_random_loops_give_the_bits_of_the_reference(seeds, room, tmp_path):
    tested = 0
    for seed in seeds:
        strict_device.configure(seed=seed)
        options = dict(update=ps.Delayed(after=random.Random(seed).choice([0, 1, 2, 3, 5])))
        if room:
            options |= dict(disk=ps.Disk(tmp_path), host_memory=f"{150 + seed % 5 * 15}KiB", device_memory=2.5)
        tested += cases.run(seed, DELAYED_EVENTS, device="strict", **options).steps > 0
    assert tested > len(seeds) // 2
