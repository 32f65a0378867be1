"""Dry runs of several processes equal real ones: same accesses, same bytes on every tier and between processes.

Processes choose one precision, whatever each of them would measure.
"""

import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import rates
import torch
import torch.distributed as dist
from laws.models import config, smallest_device_bytes
from laws.test_dry_run import LAPTOP
from laws.test_three_tiers_traffic import steps
from sampling import nightly
from torch import nn
from toys import batches, layers, mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._autograd.recomputed_layers import Activations
from patrickstar._distributed.gloo_collectives import GlooCollectives
from patrickstar._distributed.process_group import World
from patrickstar._dry_run.precision_choice import settle_precision
from patrickstar._dry_run.simulation import simulate
from patrickstar.errors import ConfigError, PatrickStarError

from . import ranks
from .test_exactness import CPU, mesh_of, random_shape
from .test_shards_on_disk import PAGE_BYTES, least_host_bytes, wide_shape

STEPS = 4
UNEQUAL = ("stall_s", "library_resident_peak_bytes", "host_peak_speculative_bytes")
"""Statistics that are times, of the process, or of the speed of threads."""


def results(engine, accumulation, max_norm, folder=None):
    """Train a step with the given engine and return its statistics, but for times; with a disk those of transfers."""
    if folder is not None:
        return dict(enumerate(steps(engine, 1)[0][0]))
    for number, batch in enumerate(batches(accumulation), start=1):
        engine.backward(engine(*batch) / accumulation, accumulate=number < accumulation)
    if max_norm is not None:
        engine.clip_grad_norm_(max_norm)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return {name: value for name, value in asdict(engine.stats.last).items() if name not in UNEQUAL}


@ranks.joined
def compare(seeds: list[int], replicas: int, at_once: bool, folder: str | None = None) -> None:
    """Compare what real and simulated processes do with random models and budgets; runs in each process.

    Args:
        at_once: Let collectives end at once. The peak of the device depends on when reductions end: their chunks keep
            their memory until then, within the budget. Nothing else does, in simulations with early or late ends.
        folder: Where a disk is, which holds what does not fit on a host as small as possible.
    """
    if at_once:
        submit = GlooCollectives._submit

        def submit_and_wait(self, job, label):
            transfer = submit(self, job, label)
            transfer.wait()
            return transfer

        GlooCollectives._submit = submit_and_wait
    for seed in seeds:
        draw, world = random.Random(seed), World(CPU)
        print(f"seed {seed}")
        shape = random_shape(draw) if folder is None else wide_shape(draw)
        precision, chunk_size = draw.choice(["bf16", "fp32"]), draw.choice([1000, 9000, "auto"])
        chunks = draw.choice([2, world.size])  # without room for chunk groups, each chunk has one owner
        device = chunks * smallest_device_bytes(shape, chunk_size, precision) + draw.randint(0, 8000)
        options = config(precision, chunk_size, device_memory=device, host_memory=1 << 30)
        options = options.model_copy(update={"reduce_dtype": draw.choice(["16-bit", "fp32"])})
        if folder is not None:
            options = options.model_copy(update={"disk": ps.Disk(folder), "reduce_dtype": "16-bit"})
            host = least_host_bytes(shape, options, replicas) + world.size * draw.choice([0, 5000, 40_000])
            options = options.model_copy(update={"host_memory": host})
        if folder is None:
            options = options.model_copy(update={"update": draw.choice([options.update, ps.Delayed(after=1)])})
        loop = draw.choice([1, 1, 2]), draw.choice([None, 1e9]), folder
        hooks = {"meter": testing.NoMeter(), "speculates": False}  # what is speculated depends on the speed of threads
        hooks |= {} if folder is None else {"page_bytes": PAGE_BYTES}
        engine = ps.Engine(shape.build, options, world=world, mesh=mesh_of(replicas), **hooks)
        expected = [results(engine, *loop) for _ in range(STEPS)]
        trace = [moment.chunks for moment in engine.inspect().trace]
        engine.close(keep=False)
        if dist.get_rank():
            continue
        for bandwidth in (1e30, 1e6):
            machine = LAPTOP.model_copy(update={"host": LAPTOP.host.model_copy(update={"memory_bandwidth": bandwidth})})
            found = []
            report = simulate(
                ps.Engine,
                shape.build,
                options,
                lambda other, loop=loop, found=found: found.append(results(other, *loop)),
                machine,
                steps=STEPS,
                processes=dist.get_world_size(),
                replicas=replicas,
                **hooks,
            )
            for number, (real, simulated) in enumerate(zip(expected, found, strict=True)):
                peaks = [each.get("device_peak_model_bytes", 0) for each in (real, simulated)]
                same = peaks[0] == peaks[1] or not (at_once and bandwidth == 1e30)
                assert max(peaks) <= device and same, f"seed {seed}: {peaks}"
                names = real.keys() - {"device_peak_model_bytes"}
                different = {name: (real[name], simulated[name]) for name in names if real[name] != simulated[name]}
                assert not different, f"seed {seed}, step {number}, {bandwidth} bytes/s: {different}"
            assert [moment.chunks for moment in report.trace.moments] == trace


@pytest.mark.parametrize(("replicas", "at_once"), [(2, True), (1, False)])
def test_bytes_equal_those_of_a_run(replicas, at_once):
    seeds = [1012, *ranks.seeds(24)[: None if nightly() else 2]]  # with the first, a sum has room once a reduction ends
    ranks.run(4, compare, seeds=seeds, replicas=replicas, at_once=at_once)


def test_with_a_disk_bytes_equal_those_of_a_run(tmp_path):
    ranks.run(2, compare, seeds=ranks.seeds(16), replicas=1, at_once=True, folder=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_many_more_cases(size, replicas, at_once):
    ranks.run(size, compare, seeds=list(range(1000, 1030)), replicas=replicas, at_once=at_once)


@ranks.in_processes(2)
def test_two_processes_choose_one_precision():
    world = World.find(CPU)
    with pytest.MonkeyPatch.context() as patch:
        # Rank 0 finds fp32 faster; the other one does not measure, since it would take the cores of rank 0.
        patch.setattr(rates.MEASURED, rates.fixed(fp32=2e9) if dist.get_rank() == 0 else None)
        with ps.initialize(layers(8, 2), ps.Config(device="cpu")) as (engine, _):
            assert engine.config.precision == "fp32"
        # Of different GPUs each counts: all have to have bf16.
        gpu = SimpleNamespace(name="GPU", has_bf16=dist.get_rank() == 0)
        patch.setattr("patrickstar._tiers.hardware.Hardware.new_accelerator", lambda device: gpu)
        settled = settle_precision(ps.Config(), layers(8, 1), torch.device("cuda", 0), world)
        assert settled.precision == "fp16"
    asked = ps.Config(device="cpu", precision="auto" if dist.get_rank() == 0 else "bf16")
    with pytest.raises(ConfigError, match="processes differ in precision: rank 0 has 'auto', rank 1 has 'bf16'"):
        ps.initialize(layers(8, 2), asked)


@ranks.in_processes(2)
def test_two_processes_choose_what_activations_do():
    torch.manual_seed(0)
    config = ps.Config(
        device="cpu", precision="fp32", device_memory="8MiB", host_memory="64MiB", activation_checkpointing="auto"
    )
    with (
        ps.initialize(lambda: layers(256, 8, nn.GELU), config) as (engine, optimizer),
        pytest.MonkeyPatch.context() as own,
    ):
        found = (Activations(None, 0.4), "a test") if not dist.get_rank() else None
        own.setattr("patrickstar._engine.activation_choice._fastest", lambda *args: found)
        for _ in range(3):
            engine.backward(mean_square(engine(torch.randn(8, 256))))
            optimizer.step()
        assert engine.config.activation_offload == 0.4 and engine.stats.last.d2h_bytes > 0


@ranks.in_processes(2)
def test_all_processes_get_the_plan_of_the_first():
    """Plan with an engine, and compare the bytes of its steps."""
    torch.manual_seed(0)
    options = ps.Config(device="cpu", precision="fp32", device_memory="8MiB", host_memory="64MiB")
    engine, optimizer = ps.initialize(lambda: layers(256, 8, nn.GELU), options)
    batch = torch.randn(8, 256)
    report = engine.plan(batch, loss=mean_square)
    assert report.processes == 2
    figures = [report.seconds, report.stats.gathered_bytes, report.stats.reduced_bytes]
    assert engine.world.all_gather_object(figures) == [figures] * 2
    for _ in range(4):
        engine.backward(mean_square(engine(batch)))
        optimizer.step()
    if not engine.world.rank:  # the other's shards may be smaller
        step = engine.stats.last
        assert (step.gathered_bytes, step.reduced_bytes) == (report.stats.gathered_bytes, report.stats.reduced_bytes)
    with pytest.raises(PatrickStarError, match="a and b must have same reduction dim"):
        engine.plan(torch.randn(8, 3), loss=mean_square)
    engine.backward(mean_square(engine(batch)))
    engine.close(keep=False)
