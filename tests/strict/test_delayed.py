"""Law: beside an accelerator, whose work is late, delayed updates give the bits of their recurrence."""

import pytest
import strict_device
from laws.test_delayed import check_random_loops
from laws.test_late_copies import some_are_slow


@pytest.mark.parametrize("room", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("seeds", some_are_slow(100, fast=5))
def test_random_loops_give_the_bits_of_the_reference(seeds, room, tmp_path):
    begin = lambda seed: strict_device.configure(seed=seed)  # noqa: E731
    check_random_loops(seeds, tmp_path if room else None, "strict", begin)
