"""One process that takes the part of any rank, for tests that send nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_processes(world: int, rank: int = 0) -> Iterator[None]:
    """Initialise torch.distributed with PyTorch's fake process group, whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
