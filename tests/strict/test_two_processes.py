"""Law 1 for two processes with a strict device each, and the end of a collective whose peer has ended."""

import os
import random
import signal
import time
from typing import Any

import pytest
import speculation_cases
import torch
import torch.distributed as dist
from distributed import ranks
from distributed.reference import AveragingTrainer
from distributed.test_exactness import mesh_of, random_config, random_shape
from distributed.test_shards_on_disk import PAGE_BYTES, least_host_bytes, wide_shape
from sampling import draws
from toys import inputs, layers, mean_square, train

import patrickstar as ps
from patrickstar._distributed.process_group import World

WITHIN_S = 600.0
"""Seconds after which a process hangs, also on a busy machine."""


def on_device(seeds: list[int], replicas: int = 1, folder: str | None = None) -> None:
    """Train random models on strict devices; runs in each process. `folder`: of a disk that stores the shards."""
    import strict_device

    dist.init_process_group("gloo")
    mesh = mesh_of(replicas)
    world = World(torch.device("strict", 0))
    for seed in seeds:
        draw = random.Random(seed)
        shape = random_shape(draw) if folder is None else wide_shape(draw)
        config = random_config(draw).model_copy(
            update={"device": "strict", "host_memory": 1 << 23, "device_memory": draw.choice([1 << 14, 1 << 17])}
        )
        loop = {"accumulation": draw.choice([1, 1, 2, 4]), "reduce_once": draw.random() < 0.5}
        if folder is not None:
            loop["reduce_once"] = False  # such sums of gradients are on the host
            config = config.model_copy(update={"device_memory": 1 << 20, "disk": ps.Disk(folder)})
            least = least_host_bytes(shape, config, replicas, World(torch.device("strict", 0)))
            world = World(torch.device("strict", 0))
            config = config.model_copy(update={"host_memory": least + draw.choice([0, 40_000])})
        max_norm = draw.choice([None, 0.1])
        generator = torch.Generator().manual_seed(1000 * seed + world.rank)
        data = [(torch.randint(0, 11, (2, 4), generator=generator).to("strict"),) for _ in range(4)]
        print(f"seed {seed}: {shape}, {config!r}", flush=True)
        strict_device.configure()
        torch.manual_seed(seed)
        reference = AveragingTrainer(shape.build, config, replicas=replicas, rounds_partial_sums=True)
        expected = train(reference, data, max_norm=max_norm, **loop)
        strict_device.configure(seed=100 * seed + world.rank)
        torch.manual_seed(seed)
        hooks = dict(poison=True, meter=ps.testing.NoMeter(), evict_everything=draw.random() < 0.5)
        hooks |= {} if folder is None else {"page_bytes": PAGE_BYTES}
        engine = ps.Engine(shape.build, config, world=world, mesh=mesh, **hooks)
        found = train(engine, data, max_norm=max_norm, **loop)
        ps.testing.assert_same_bits(expected, found, "results")
        ps.testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
        engine.close()
    dist.destroy_process_group()


def test_no_schedule_changes_the_results_of_two_processes():
    ranks.run(2, on_device, seeds=list(range(draws(12))))


def test_no_schedule_changes_the_results_of_shards_on_disk(tmp_path):
    ranks.run(2, on_device, seeds=list(range(40, 40 + draws(8))), folder=str(tmp_path))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_schedule_changes_the_results_of_two_replicas(size):
    ranks.run(size, on_device, seeds=list(range(20, 20 + draws(12))), replicas=2)


def speculates(seeds: list[int]) -> None:
    """Train with events between backward and step; runs in each process."""
    import strict_device

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    speculated = hits = 0
    for seed in seeds:
        draw = random.Random(seed)
        steps, precision = 7, draw.choice(["bf16", "bf16", "fp16"])
        norms = [draw.choice([None, 1e9, 1e9, 1e9, 1e-3]) for _ in range(steps)]
        backwards = draw.choice([[1] * steps, [2] * steps])
        config = ps.Config(
            device="strict",
            precision=precision,
            optimizer=ps.AdamW(lr=1e-2),
            reduce_dtype=draw.choice(["16-bit", "fp32"]),
            chunk_size=draw.choice(["3KiB", "6KiB", "13KiB"]),
            host_memory=draw.choice(["600KiB", "8MiB"]),
            device_memory=draw.choice([1 << 16, 1 << 20]),
        )
        print(f"seed {seed}: {norms}, {backwards}, {config!r}", flush=True)

        def script(trainer: Any, seed: int = seed, norms: Any = norms, backwards: Any = backwards) -> list[Any]:
            results: list[Any] = []
            for number, (norm, count) in enumerate(zip(norms, backwards, strict=True)):
                for each in range(count):
                    data = 1000 * seed + 100 * rank + 10 * number + each
                    results.append(speculation_cases.backward(trainer, data))
                if norm is not None:
                    results.append(trainer.clip_grad_norm_(norm).to("cpu", copy=True))
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            return results

        strict_device.configure()
        torch.manual_seed(seed)
        reference = AveragingTrainer(speculation_cases.build, config)
        expected = script(reference)
        strict_device.configure(seed=100 * seed + rank)
        torch.manual_seed(seed)
        hooks = dict(poison=True, meter=ps.testing.NoMeter(), evict_everything=draw.random() < 0.3)
        world = World(torch.device("strict", 0))  # closed with its last engine
        with ps.Engine(speculation_cases.build, config, world=world, **hooks) as engine:
            ps.testing.assert_same_bits(expected, script(engine), "results")
            ps.testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
            speculated += engine.stats.total.speculated
            hits += engine.stats.total.speculation_hits
    assert 0 < hits < speculated, f"{hits} of {speculated} updates were confirmed"
    dist.destroy_process_group()


def test_updates_before_the_step_of_two_processes_change_no_bit():
    ranks.run(2, speculates, seeds=list(range(draws(8))))


def waits() -> None:
    """End rank 1 while rank 0 waits for an event that never passes; runs in each process."""
    import strict_device  # noqa: F401

    from patrickstar._distributed.stream_collectives import StreamCollectives
    from patrickstar._tiers.hardware import Hardware

    class NeverPasses:
        """Event of a collective that waits for a process that has ended."""

        def query(self) -> bool:
            return False

    dist.init_process_group("gloo")
    device = torch.device("strict", 0)
    world = World(device)
    if world.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator = Hardware(device).accelerator
    assert accelerator is not None
    collectives = StreamCollectives(world, accelerator)
    accelerator.record = lambda stream=None: NeverPasses()  # type: ignore[method-assign]
    try:
        collectives.wait(NeverPasses())
    finally:
        collectives.close()
        world.close()


def test_a_collective_ends_with_its_peer():
    ended = ranks.wait(ranks.start(2, waits), WITHIN_S)
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].code == 1 and "PeerError: rank 1 (process" in ended[0].text, ended[0].text[-3000:]


def moves_nothing(clips: bool, precision: str, reduce_dtype: str) -> None:
    """Train until all is planned and fits; runs in each process."""
    import strict_device

    dist.init_process_group("gloo")
    world = World(torch.device("strict", 0))
    strict_device.configure(seed=world.rank)
    budgets = {"chunk_size": "16KiB", "device_memory": "8MiB", "host_memory": "8MiB"}
    config = ps.Config(device="strict", precision=precision, reduce_dtype=reduce_dtype, **budgets)
    torch.manual_seed(0)
    hooks = dict(poison=True, meter=ps.testing.NoMeter())
    engine = ps.Engine(lambda: layers(64, 8, torch.nn.Tanh, bias=False), config, world=world, **hooks)
    for (batch,) in inputs(6, 64, seed=world.rank):
        batch, copied_bytes = batch.to("strict"), strict_device.copied_bytes()
        engine.backward(mean_square(engine(batch)))
        if clips:
            engine.clip_grad_norm_(1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        copied_bytes = strict_device.copied_bytes() - copied_bytes
    last, count = engine.stats.last, 8 * 64 * 64 // 2  # of each process: 2 (p - 1) / p M
    assert (last.h2d_bytes, last.d2h_bytes, copied_bytes, last.evictions) == (0, 0, 0, 0), (last, copied_bytes)
    itemsize, wide = 4 if precision == "fp32" else 2, precision == "fp32" or reduce_dtype == "fp32"
    assert (last.gathered_bytes, last.reduced_bytes) == (itemsize * count, (4 if wide else 2) * count), last
    engine.close(keep=False)
    dist.destroy_process_group()


@pytest.mark.pairwise
@pytest.mark.parametrize("reduce_dtype", ["16-bit", "fp32"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_step_of_what_fits_copies_nothing_between_host_and_device(clips, precision, reduce_dtype):
    ranks.run(2, moves_nothing, clips=clips, precision=precision, reduce_dtype=reduce_dtype)
