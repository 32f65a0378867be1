"""Law: beside an accelerator, whose work is late, delayed updates give the bits of their recurrence."""

import random

import pytest
import speculation_cases as cases
import strict_device
from laws.test_late_copies import some_are_slow
from speculation_cases import DELAYED_EVENTS

import patrickstar as ps


@pytest.mark.parametrize("room", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("seeds", some_are_slow(100, fast=10))
def test_random_loops_give_the_bits_of_the_reference(seeds, room, tmp_path):
    tested = 0
    for seed in seeds:
        strict_device.configure(seed=seed)
        options = dict(update=ps.Delayed(after=random.Random(seed).choice([0, 1, 2, 4, 40])))
        if room:
            options |= dict(disk=ps.Disk(tmp_path), host_memory=f"{150 + seed % 5 * 15}KiB", device_memory=2.5)
        tested += cases.run(seed, DELAYED_EVENTS, device="strict", **options).steps > 0
    assert tested > len(seeds) // 2
