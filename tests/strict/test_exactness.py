"""Law 1 on the strict device: for any schedule, model, loop and budget the bits are those of plain PyTorch there."""

from functools import cache

import pytest
import strict_device
import torch
import toys
from laws.test_late_copies import run_drawn, some_are_slow


@cache
def batches(count: int, length: int = 5) -> list[tuple[torch.Tensor]]:
    """Return the batches of `toys.batches` on the device."""
    return [(ids.to("strict"),) for (ids,) in toys.batches(count, length)]


def run_schedule(seed: int, directory) -> bool:
    """Train a random model in a random loop with random budgets; return False if the budgets are too small."""
    strict_device.configure()
    begin = lambda: strict_device.configure(seed=seed) or {}  # noqa: E731
    return run_drawn(seed, directory, begin, batches, device="strict", host_memory=1 << 22) is not None


@pytest.mark.parametrize("seeds", some_are_slow(200, fast=3))
def test_no_schedule_changes_results(seeds, tmp_path):
    ran = [run_schedule(seed, tmp_path) for seed in seeds]
    assert sum(ran) > len(seeds) // 2, f"only {sum(ran)} of {seeds} ran"
