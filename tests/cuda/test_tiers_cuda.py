"""Three tiers below a GPU: copies on streams of their own, pages through pinned stages, the same bits."""

import pytest
import torch
from torch import nn

import patrickstar as ps
from patrickstar.engine.engine import Engine
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.copies import Copies
from patrickstar.memory.hardware import Hardware
from patrickstar.memory.host import HostTier
from patrickstar.schedule.prefetch import NextUseAhead, OnDemand
from patrickstar.testing import ReferenceTrainer, assert_exact, assert_same_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine offers no CUDA device"),
]


def build() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())], nn.Linear(256, 16))


def batches(count: int) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(32, 256, generator=generator),) for _ in range(count)]


@pytest.mark.parametrize("stress", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_training_from_disk_gives_the_bits_of_plain_pytorch(tmp_path, stress, max_norm):
    config = ps.Config(
        device="cuda", chunk_size="128KiB", device_memory="700KiB", host_memory="6MiB", disk=ps.Disk(directory=tmp_path)
    )
    assert_exact(build, batches(5), config, stress=stress, max_norm=max_norm)


@pytest.mark.parametrize("policy", [OnDemand, NextUseAhead])
def test_chunks_that_come_ahead_from_the_host_give_the_same_bits(policy):
    config = ps.Config(device="cuda", chunk_size="128KiB", device_memory="2MiB", host_memory="64MiB")
    torch.manual_seed(0)
    reference = ReferenceTrainer(build, config)
    torch.manual_seed(0)
    engine = Engine(build, config, policy=policy)
    for (values,) in batches(6):
        for trainer in (reference, engine):
            loss = trainer(values).float().pow(2).mean()
            trainer.backward(loss)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
    engine.close()


def test_a_copy_runs_on_a_stream_of_its_own_and_computing_waits_for_it_on_the_gpu():
    device = torch.device("cuda")
    host, copies = HostTier(1 << 26, 1 << 26, Hardware(device).slab, poison=False), Copies(device)
    chunk = Chunk("param16", 0, 1 << 24, "bfloat16", device)
    host.take(chunk).fill_(3.0)
    chunk.host_valid = True
    chunk.take_device()
    transfer = copies.up(chunk)
    transfer.order()
    assert bool((chunk.on_device(chunk.whole) == 3).all())
    chunk.on_device(chunk.whole).fill_(5.0)
    down = copies.down(chunk)
    down.wait()
    assert bool((chunk.host == 5).all())
    chunk.free_device(poison=False)
    host.give(chunk)
    copies.close()
    host.close()
