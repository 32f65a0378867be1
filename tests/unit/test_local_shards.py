"""Rounded copies of masters, and masters that follow what was written to the copies."""

import torch

from patrickstar._params.local_shards import copy_rounded
from patrickstar._params.param_values import follow_written
from patrickstar.testing import assert_same_bits


def test_a_master_follows_changed_elements_and_keeps_the_others_precision():
    master = torch.tensor([1.0001, 2.0001, 3.0001])
    rounded = torch.empty(3, dtype=torch.bfloat16)
    copy_rounded(master, rounded)
    assert_same_bits([master.bfloat16()], [rounded], "a copy")
    rounded[1] = 7
    follow_written(master, rounded)
    assert master.tolist() == torch.tensor([1.0001, 7, 3.0001]).tolist()
    follow_written(master, torch.tensor([1.0, 2.0, 3.0]), exactly=True)
    assert master.tolist() == [1, 2, 3]
