"""Memory of an accelerator that is not CUDA: it is never read as if it lay on the host.

The meta device stands for one. A copy from its address would end the process.
"""

import pytest
import torch

from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.swap_file import SwapFile

META = torch.device("meta")


@pytest.mark.parametrize("call", [DiskTier.read, DiskTier.write])
def test_the_disk_tier_moves_memory_of_the_host_and_of_cuda_alone(tmp_path, call):
    tier = DiskTier(SwapFile(tmp_path, 4096))
    chunk = Chunk("param16", 0, 1024, "float32", META)
    tier.reserve(chunk)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        call(tier, chunk, 0, torch.empty(4096, dtype=torch.uint8, device=META)).wait()
    tier.close()
