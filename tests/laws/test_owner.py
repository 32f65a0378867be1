"""Law 5, ownership: every chunk has a valid copy, and a duplicate may be dropped at any time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import manager_of
from sampling import draws
from toys import batches, train

from patrickstar._engine.engine import Engine
from patrickstar.testing import NoMeter

from .models import chunk_sizes, config, shapes, smallest_device_bytes


@settings(max_examples=draws(8), deadline=None, print_blob=True)
@given(shapes, chunk_sizes, st.integers(0, 3000), st.integers(0, 2**32))
def test_one_owner_and_duplicates_that_agree(shape, chunk_size, spare_bytes, seed):
    budget = smallest_device_bytes(shape, chunk_size, "bf16") + spare_bytes
    torch.manual_seed(0)
    engine = Engine(shape.build, config("bf16", chunk_size, device_memory=budget), meter=NoMeter(), poison=True)
    torch.manual_seed(0)
    dropping = Engine(shape.build, config("bf16", chunk_size, device_memory=budget), meter=NoMeter(), poison=True)
    for step in range(3):
        torch.manual_seed(step)
        losses = train(engine, batches(1))
        drop_duplicates(dropping, seed + step)
        torch.manual_seed(step)
        assert train(dropping, batches(1)) == losses
        for chunk in manager_of(engine).chunks.values():
            assert chunk.in_memory and not chunk.disk_valid
            if chunk.device_valid and chunk.host_valid:
                assert torch.equal(chunk.on_device(chunk.whole), chunk.on_host(chunk.whole))
    engine.close()
    dropping.close()


def drop_duplicates(engine: Engine, seed: int) -> None:
    """Drop the host copy of random chunks that have two valid copies."""
    generator = torch.Generator().manual_seed(seed)
    manager = manager_of(engine)
    for chunk in manager.chunks.values():
        if chunk.device_valid and chunk.host_valid and torch.rand((), generator=generator) < 0.5:
            manager.host_tier.free(chunk)
