"""Updates of all parameters together beside an accelerator: no schedule of its streams changes a bit."""

from functools import partial

import pytest
import strict_device
from laws.group_optimizers import Branches, GlobalScale, batch, config_of
from laws.test_late_copies import some_are_slow
from toys import mean_square, update

import patrickstar as ps

STEPS = 6


def script(seed, trainer, optimizer):
    """Train, on a schedule of the device that the seed draws; return the losses."""
    strict_device.configure(seed=seed)
    losses = []
    for step in range(STEPS):
        losses.append(update(trainer, mean_square(trainer(batch(step).to("strict")))))
    return losses


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("seeds", some_are_slow(24, fast=2))
def test_no_schedule_changes_results(seeds, disk, tmp_path):
    options = {"disk": ps.Disk(tmp_path, capacity="1MiB"), "host_memory": "96KiB"} if disk else {}
    for seed in seeds:
        config = config_of(GlobalScale, "bf16", **{"device": "strict", "device_memory": "1MiB"} | options)
        ps.testing.compare(Branches, config, partial(script, seed), stress=seed % 2 == 0)
