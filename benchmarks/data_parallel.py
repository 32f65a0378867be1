"""Measure data parallelism over gloo: bytes on the wire, model data per process, and step time against FSDP2.

python benchmarks/data_parallel.py [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 11] [--processes 1 2 4]
Steps of the engine alternate with steps of PyTorch's `fully_shard` (same blocks, bf16 operators and reductions, fp32
parameters, fused AdamW) in the same processes; the ratio is the median over pairs. Bytes on the wire are counted twice:
by the engine, and by the kernel on the loopback device, including TCP headers and coordination messages. `--chunk-size`
is that of the runs with a budget of two groups.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import mean, median
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from fresh_processes import rendezvous
from report import filled, options, publish
from steps import Plain, gpt, ratio_cells, seconds_of, tokens, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar._engine.param_init import make_layout, param_specs
from patrickstar._layout.byte_size import parse_size
from patrickstar._layout.shard_group import ShardGroup
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.device_tier import DeviceTier
from patrickstar.testing import NoMeter

BUDGETS = {"room": "whole machine", "tight": "two groups, without activations"}
Timed = tuple[float, int]
"""Seconds of a step, and the bytes on the loopback device."""


def loopback_bytes() -> int:
    """Return the bytes that the loopback device has sent since boot."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def engine_of(given: argparse.Namespace, tight: bool) -> ps.Engine:
    """Return an engine with the whole machine as budget, or with two chunk groups."""
    torch.manual_seed(0)
    world, build = World.find(torch.device("cpu")), partial(gpt, given.model)
    config = ps.Config(device="cpu", precision="bf16", optimizer=ps.AdamW(lr=1e-4))
    if not tight:
        return ps.Engine(build, config, world=world)
    config = config.model_copy(update={"chunk_size": parse_size(given.chunk_size)})
    model = build()
    specs = param_specs(model, model, config)
    if world.size > 1:
        group = ShardGroup.of(world.rank, [range(world.size)])
        specs = [replace(spec, group=group) for spec in specs]
    largest = max(chunk.compute_bytes for chunk in make_layout(specs, config, 1 << 40).chunks)
    config = config.model_copy(update={"device_memory": 2 * largest})
    return ps.Engine(build, config, meter=NoMeter(), world=world)


@contextmanager
def metered(engine: ps.Engine) -> Iterator[list[int]]:
    """Record the bytes of chunks on device and host: at first, and after each allocation of device memory."""

    def chunk_bytes() -> int:
        state = engine.inspect()
        return state.device.chunk_bytes + state.host.chunk_bytes

    def metered_allocate(tier: DeviceTier, chunk: Chunk) -> None:
        allocate(tier, chunk)
        held_bytes.append(chunk_bytes())

    held_bytes, allocate = [chunk_bytes()], DeviceTier.allocate
    with mock.patch.object(DeviceTier, "allocate", metered_allocate):
        yield held_bytes


def fsdp_of(given: argparse.Namespace) -> Plain:
    """Return a model sharded by PyTorch's FSDP2."""
    torch.manual_seed(0)
    model, mesh = gpt(given.model), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in (*model.transformer.h, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return Plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def timed(trainer: Any, ids: torch.Tensor) -> Timed:
    """Train a step; return its seconds and the bytes on the loopback device."""
    barrier()
    wire = loopback_bytes()
    seconds = seconds_of(lambda: (train_step(trainer, ids).item(), barrier()))
    return seconds, loopback_bytes() - wire


def time_pairs(fsdp: Plain, engine: ps.Engine, ids: torch.Tensor, rounds: int) -> list[tuple[Timed, Timed]]:
    """Return the steps of both, which alternate."""
    for _ in range(3):
        timed(engine, ids)
        timed(fsdp, ids)
    return [(timed(fsdp, ids), timed(engine, ids)) for _ in range(rounds)]


def pair_cells(pairs: list[tuple[Timed, Timed]], numel: int) -> dict[str, str]:
    """Return the cells of pairs of steps, with the bytes on the loopback device per element."""
    sides = dict(zip(("FSDP2", "engine"), zip(*pairs, strict=True), strict=True))
    seconds = {name: [step[0] for step in steps] for name, steps in sides.items()}
    row = {f"{name} s": f"{median(values):.3f}" for name, values in seconds.items()}
    row |= ratio_cells(seconds["FSDP2"], seconds["engine"])
    return row | {f"{name} bytes": f"{median(step[1] for step in steps) / numel:.3f}" for name, steps in sides.items()}


def worker(given: argparse.Namespace, size: int, rank: int) -> dict[str, Any]:
    """Train in this process; return the measurements."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if size > 1:
        dist.init_process_group("gloo")
    ids = tokens(given.model, given.batch, given.sequence, seed=rank)
    results: dict[str, Any] = {}
    for name in BUDGETS:
        engine = engine_of(given, name == "tight")
        for _ in range(3):
            timed(engine, ids)
        with metered(engine) as held_bytes:
            _, wire = timed(engine, ids)
        last, layout = engine.stats.last, engine.layout
        results[name] = {
            "gathered": last.gathered_bytes,
            "reduced": last.reduced_bytes,
            "sent": last.gathered_bytes + last.reduced_bytes,
            "wire": wire / size,
            "rounds": last.rounds,
            "peak": max(held_bytes),
            "own": layout.model_data_bytes,
            "parameters": layout.numel,
            "padding": layout.padding_bytes,
            "padded": sum(chunk.numel for chunk in layout.chunks),
            "group": max(chunk.compute_bytes for chunk in layout.chunks),
        }
        if name == "room" and size > 1 and given.rounds:
            results["pairs"] = time_pairs(fsdp_of(given), engine, ids, given.rounds)
        engine.close(keep=False)
    return results


def launch(given: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    """Return the measurements of `size` processes, which share the processors."""
    rendezvous(size, max(1, len(os.sched_getaffinity(0)) // size))
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(worker, given, size), range(size)))


def memory_row(size: int, budget: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    most = {key: max(row[key] for row in rows) for key in ("own", "padding", "group", "peak")}
    data_bytes = 14 * rows[0]["parameters"] / size
    return {
        "p": str(size),
        "device budget": BUDGETS[budget],
        "14 M/p": f"{data_bytes:,.0f}",
        "shard": f"{most['own']:,}",
        "of which padding": f"{most['padding']:,}",
        "largest group": f"{most['group']:,}",
        "peak": f"{most['peak']:,}",
        "peak / limit": f"{most['peak'] / (data_bytes + 2 * most['group'] + most['padding']):.3f}",
    }


def wire_row(size: int, budget: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    means = {key: mean(row[key] for row in rows) for key in ("gathered", "reduced", "sent", "wire")}
    sent_numel, padded = (rows[0][key] * (size - 1) / size for key in ("parameters", "padded"))
    return {
        "p": str(size),
        "device budget": BUDGETS[budget],
        "parameters": f"{means['gathered']:,.0f}",
        "gradients": f"{means['reduced']:,.0f}",
        "sent / ((p-1)/p M)": f"{means['sent'] / sent_numel:.3f}",
        "loopback bytes / ((p-1)/p M)": f"{means['wire'] / sent_numel:.3f}",
        "sent / (6 (p-1)/p M)": f"{means['sent'] / (6 * sent_numel):.3f}",
        "same, M with padding": f"{means['sent'] / (6 * padded):.3f}",
        "coordination steps": str(rows[0]["rounds"]),
    }


def main() -> None:
    shapes = {"model": "gpt-40m", "batch": 1, "sequence": 512}
    given = options(__doc__, **shapes, rounds=11, processes=[1, 2, 4], chunk_size="2200KiB")
    memory, wire, seconds = [], [], []
    for size in given.processes:
        results = launch(given, size)
        for budget in BUDGETS:
            rows = [result[budget] for result in results]
            memory.append(memory_row(size, budget, rows))
            if size > 1:
                wire.append(wire_row(size, budget, rows))
        if "pairs" in results[0]:
            sent_numel = results[0]["room"]["parameters"] * (size - 1)
            seconds.append({"p": str(size)} | pair_cells(results[0]["pairs"], sent_numel))
    shape = f"{given.model}, bf16, {given.batch} x {given.sequence} tokens per process and step, gloo"
    publish("data_parallel_memory", filled("data_parallel_memory", shape=shape), memory)
    if wire:
        publish("data_parallel_wire", filled("data_parallel_wire", shape=shape), wire)
    if seconds:
        publish("data_parallel_time", filled("data_parallel_time", shape=shape), seconds)


if __name__ == "__main__":
    main()
