"""Law: in a planned step no thread but worker threads waits for the device."""

from functools import partial

import pytest
import strict_device
import toys
from probes import manager_of
from sampling import draws
from seeded import engine_of
from torch import nn

import patrickstar as ps
from patrickstar._layout.schema import GRAD32
from patrickstar._schedule.eviction_prefetch import AggressivePrefetch, DemandFetch
from patrickstar._schedule.placement import Tier

WIDTH = 64
STEPS = 7
PLANNED = 4
"""Number of the first step that follows a plan made in a step like it."""
PARAM16_BYTES = 8 * 2 * (WIDTH * WIDTH + WIDTH)


def waits_of_steps(
    tmp_path, *, update: bool = False, accumulation: int = 1, policy=None, seed: int = 1, **options
) -> list[dict[str, int]]:
    """Train; return the host waits of each step, by what was called, and check that chunks moved or not."""
    strict_device.configure(seed=seed)
    data = [(batch.to("strict"),) for (batch,) in toys.inputs(STEPS, width=WIDTH, rows=32)]
    options |= {"disk": ps.Disk(tmp_path)} if "disk" in options else {}
    config = ps.Config(device="strict", chunk_size="18KiB", **{"host_memory": "8MiB"} | options)
    engine = engine_of(partial(toys.layers, WIDTH, 8, nn.GELU), config, prefetch_policy=policy, page_bytes=4096)
    waits = []
    for batch in data:
        strict_device.extension.reset_host_waits()
        for number in range(accumulation):
            engine.backward(engine(*batch).float().square().mean(), update=update and number == accumulation - 1)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        waits.append(strict_device.extension.host_waits())
    moved = engine.stats.last.h2d_bytes
    assert (moved > 0) == (int(config.device_memory) < 4 * PARAM16_BYTES)
    assert (engine.inspect().disk is not None) == (config.disk is not None)
    if config.disk is None:  # whose pages pass through host memory that is no chunk's either
        activations = engine.stats.last.host_peak_non_model_bytes - 3 * 2 * WIDTH * WIDTH
        assert (activations >= 8 * 32 * WIDTH * 2) == config.activation_offload
    else:
        assert {param.optimizer_tier for param in engine.inspect().parameters} == {"disk"}
    engine.close()
    return waits


CASES = {
    "everything on the device": dict(device_memory="8MiB"),
    "optimizer states on the host": dict(device_memory="120KiB"),
    "updated in backward": dict(device_memory="120KiB", update=True),
    "half of the parameters": dict(device_memory="60KiB"),
    "half of the parameters, updated in backward": dict(device_memory="60KiB", update=True),
    "accumulated over three backwards": dict(device_memory="120KiB", accumulation=3),
    "accumulated over two backwards, half of the parameters": dict(device_memory="60KiB", accumulation=2),
    "offloaded activations": dict(device_memory="120KiB", activation_offload=True),
    "optimizer states on disk": dict(device_memory="120KiB", host_memory="160KiB", disk=True),
    "prefetched": dict(device_memory="60KiB", policy=AggressivePrefetch),
    "fetched on demand": dict(device_memory="60KiB", policy=DemandFetch),
}


@pytest.mark.parametrize("seed", range(1, 1 + draws(2)))
@pytest.mark.parametrize("case", CASES)
def test_a_planned_step_does_not_wait(case, seed, tmp_path):
    waits = waits_of_steps(tmp_path, seed=seed, **CASES[case])
    assert waits[PLANNED:] == [{"event": 0, "stream": 0, "copy": 0, "op": 0}] * (STEPS - PLANNED)


def test_the_device_adds_to_sums_of_gradients_that_are_on_their_way_to_the_host():
    results = []
    for evict in (False, True):
        strict_device.configure(seed=1)
        config = ps.Config(device="strict", chunk_size="18KiB", device_memory="8MiB", host_memory="8MiB")
        with engine_of(partial(toys.layers, WIDTH, 8, nn.GELU), config) as engine:
            manager = manager_of(engine)
            for number, (batch,) in enumerate(toys.inputs(3 * STEPS, width=WIDTH, rows=32)):
                batch, earlier = batch.to("strict"), strict_device.extension.host_waits()
                if evict and number == 3 * STEPS - 1:
                    sums = [chunk for (kind, _), chunk in manager.chunks.items() if kind == GRAD32]
                    assert sums
                    for chunk in sums:
                        assert chunk.device.valid and manager.cache.ensure_host_block(chunk)
                        manager.transfers.start_eviction(chunk, Tier.HOST)
                engine.backward(engine(batch).float().square().mean(), accumulate=number % 3 < 2)
                assert strict_device.extension.host_waits() == earlier or number < 3 * PLANNED
                if number % 3 == 2:
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
            results.append(engine.state_dict())
    ps.testing.assert_same_bits(*results, "parameters")
