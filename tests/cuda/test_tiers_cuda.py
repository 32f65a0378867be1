"""Device, host and disk with a GPU: copies on separate streams, staging buffers, the same bits."""

import pytest
import torch
from cuda_cases import DEVICE, ON_GPU, budget, check_training, inputs, layers, make_engine, marks, plain_run
from cuda_cases import run_program as run
from gpu_stages.bits import DelayedHardware
from toys import train

import patrickstar as ps
from patrickstar._schedule.eviction_prefetch import AggressivePrefetch, DemandFetch
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_tier import HostTier
from patrickstar.testing import assert_exact, assert_same_bits

pytestmark = marks

CONFIG = ps.Config(device=str(DEVICE), chunk_size="128KiB", host_memory="64MiB")
CYCLES = 100_000_000
"""Cycles that a GPU sleeps, about 50 ms."""


@pytest.mark.parametrize("stress", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_training_from_disk_gives_the_bits_of_plain_pytorch(tmp_path, stress, max_norm):
    config = ps.Config(
        device=str(DEVICE), chunk_size="128KiB", device_memory="700KiB", host_memory="6MiB", disk=ps.Disk(tmp_path)
    )
    assert_exact(layers, inputs(5), config, stress=stress, max_norm=max_norm)


@pytest.mark.parametrize("policy", [DemandFetch, AggressivePrefetch])
def test_prefetched_chunks_give_the_same_bits(policy):
    """1 MiB of 16-bit parameters, and activations of 16 KiB per layer."""
    assert check_training(CONFIG, "1536KiB", 6, prefetch_policy=policy).h2d_bytes > 0


def test_late_copies_change_nothing():
    """Also in planned steps, computation waits for copies, and evicted memory is not reused too early."""
    hooks = {"hardware": DelayedHardware(CONFIG.find_device()), "prefetch_policy": AggressivePrefetch}
    check_training(CONFIG, "1536KiB", 5, **hooks)


def test_an_engine_is_closed_with_copies_in_flight():
    config = CONFIG.model_copy(update={"precision": "fp32"})
    plain = plain_run(config, 3)
    config = config.model_copy(update={"device_memory": budget("3MiB", torch.float32)})
    hooks = {"hardware": DelayedHardware(config.find_device()), "prefetch_policy": AggressivePrefetch}
    engine = make_engine(layers, config, **hooks)
    results = train(engine, inputs(3))
    engine(*inputs(1)[0])
    module = engine.module
    engine.close()
    results += [value.detach().cpu() for value in module.state_dict().values()]
    assert_same_bits(plain[: len(results)], results, "losses, and parameters after closing")


EXIT = """
import torch
from cuda_cases import *
import patrickstar as ps
config = ps.Config(device=str(DEVICE), chunk_size="128KiB", host_memory="64MiB", disk={disk!r},
                   device_memory=budget("1536KiB"))
engine = make_engine(layers, config)
train(engine, inputs(3))
engine(*inputs(1)[0])
print("done")
"""


@pytest.mark.parametrize("room", [False, True], ids=["host", "disk"])
def test_a_process_may_end_without_closing_its_engine(tmp_path, room):
    assert run(EXIT.format(disk=str(tmp_path) if room else None)).split() == ["done"]


@pytest.mark.skipif(not ON_GPU, reason="streams need a GPU")
def test_a_copy_runs_on_its_own_stream_and_computation_waits_for_it_on_the_gpu():
    """Each copy starts 50 ms after it was issued.

    Every kernel runs once before: the driver loads it at its first launch, and may wait for the device meanwhile.
    """
    device = torch.device("cuda")
    hardware = Hardware(device)
    host, copies = HostTier(1 << 26, 1 << 26, hardware.host_arena, poison=False), hardware.copies()
    chunk = Chunk("param16", 0, 1 << 24, "bfloat16", device)
    host.allocate(chunk).fill_(3.0)
    chunk.host.valid = True
    chunk.allocate_device()
    chunk.on_device(chunk.whole).fill_(3.0)
    assert bool((chunk.on_device(chunk.whole) == 3).all())
    chunk.on_device(chunk.whole).fill_(7.0)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with copies.accelerator.use(copies.up_stream, after_current=False):
        torch.cuda._sleep(CYCLES)
    transfer = copies.up(chunk)
    assert not transfer.done, "the copy overlaps with computation"
    transfer.order()
    fetched = (chunk.on_device(chunk.whole) == 3).all()
    assert not transfer.done, "the host has not waited for the copy"
    assert bool(fetched)
    chunk.on_device(chunk.whole).fill_(5.0)
    with copies.accelerator.use(copies.down_stream, after_current=False):
        torch.cuda._sleep(CYCLES)
    down = copies.down(chunk)
    assert not down.done
    down.wait()
    assert bool((chunk.host.memory == 5).all())
    chunk.free_device(poison=False)
    host.free(chunk)
    copies.close()
    host.unlock()
