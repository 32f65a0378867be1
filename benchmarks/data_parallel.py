"""Measure data parallelism over gloo: bytes on the wire, model data per process, and step time against FSDP2.

python benchmarks/data_parallel.py [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 11] [--processes 1 2 4]
Steps of the engine alternate with steps of PyTorch's `fully_shard` (same blocks, bf16 operators and reductions, fp32
parameters, fused AdamW) in the same processes; the ratio is the median over pairs. Bytes on the wire are counted twice:
by the engine, and by the kernel on the loopback device, including TCP headers and coordination messages.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from report import publish
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar._engine.param_init import make_layout, param_specs
from patrickstar._layout.shard_group import ShardGroup
from patrickstar._memory.chunk import Chunk
from patrickstar._memory.device_tier import DeviceTier
from patrickstar._models.presets import PRESETS
from patrickstar.testing import NoMeter


def build(name: str) -> GPT2LMHeadModel:
    config = PRESETS[name].config()
    config.use_cache = False
    return GPT2LMHeadModel(config).train()


def loopback_bytes() -> int:
    """Return the bytes that the loopback device has sent since boot."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("this machine has no loopback device")


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class Ours:
    """Trainer on the engine."""

    def __init__(self, options: argparse.Namespace, tight: bool) -> None:
        torch.manual_seed(0)
        world = World.find(torch.device("cpu"))
        config = ps.Config(device="cpu", optimizer=ps.AdamW(lr=1e-4))
        meter = None
        if tight:
            config = ps.Config(device="cpu", optimizer=ps.AdamW(lr=1e-4), chunk_size=options.chunk_size)
            specs = param_specs(build(options.model), config)
            if world.size > 1:
                group = ShardGroup.of(world.rank, [range(world.size)])
                specs = [replace(spec, group=group) for spec in specs]
            layout = make_layout(specs, config, 1 << 40)
            largest = max(chunk.compute_bytes for chunk in layout.chunks)
            config = config.model_copy(update={"device_memory": 2 * largest})
            meter = NoMeter()
        self.engine = ps.Engine(partial(build, options.model), config, meter=meter, world=world)
        self.optimizer = self.engine.optimizer

    def step(self, ids: torch.Tensor) -> float:
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


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


class Fsdp:
    """Trainer on PyTorch's FSDP2."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = build(options.model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in self.model.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, ids: torch.Tensor) -> float:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def timed(trainer: Any, ids: torch.Tensor) -> tuple[float, int, float]:
    """Run a step and return its seconds, the bytes on the loopback device, and the loss."""
    barrier()
    wire, start = loopback_bytes(), time.perf_counter()
    loss = trainer.step(ids)
    barrier()
    return time.perf_counter() - start, loopback_bytes() - wire, loss


def worker(options: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(rank)
    vocabulary = PRESETS[options.model].config().vocab_size
    ids = torch.randint(0, vocabulary, (options.batch, options.sequence), generator=generator)
    results: dict[str, Any] = {}
    for name in ("room", "tight"):
        ours = Ours(options, name == "tight")
        layout = ours.engine.layout
        for _ in range(3):
            timed(ours, ids)
        with metered(ours.engine) as held_bytes:
            _, wire, _ = timed(ours, ids)
        last = ours.engine.stats.last
        results[name] = {
            "sent": last.gathered_bytes + last.reduced_bytes,
            "gathered": last.gathered_bytes,
            "reduced": last.reduced_bytes,
            "wire": wire / size,
            "rounds": last.rounds,
            "device": last.device_peak_model_bytes,
            "peak": max(held_bytes),
            "own": layout.model_data_bytes,
            "parameters": layout.numel,
            "padding": layout.padding_bytes,
            "padded": sum(chunk.numel for chunk in layout.chunks),
            "groups": layout.chunk_count,
            "group": max(chunk.compute_bytes for chunk in layout.chunks),
        }
        if name == "room" and size > 1 and options.rounds:
            fsdp = Fsdp(options)
            for _ in range(2):
                timed(fsdp, ids)
            pairs = []
            for _ in range(options.rounds):
                pairs.append((timed(fsdp, ids), timed(ours, ids)))
            results["pairs"] = pairs
            del fsdp
        ours.engine.close(keep=False)
    print(json.dumps(results))


def launch(size: int, script: str = __file__) -> list[dict[str, Any]]:
    """Run a script's workers in `size` processes, and return what each has printed as JSON in its last line."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, len(os.sched_getaffinity(0)) // size))
    processes = []
    for rank in range(size):
        env = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"OMP_NUM_THREADS": threads, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read after the processes have ended)
        command = [sys.executable, script, "--worker", *sys.argv[1:]]
        processes.append((subprocess.Popen(command, env=os.environ | env, stdout=out), out))
    results = []
    for process, out in processes:
        if process.wait():
            raise SystemExit(f"a process failed with exit code {process.returncode}")
        out.seek(0)
        results.append(json.loads(out.read().splitlines()[-1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-40m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--chunk-size", default="2200KiB", help="chunk size of the runs with a budget of two groups")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return

    def budget(name: str) -> str:
        return "whole machine" if name == "room" else "two groups, without activations"

    memory, wire, seconds = [], [], []
    for size in options.processes:
        results = launch(size)
        for name in ("room", "tight"):
            rows = [result[name] for result in results]
            first = rows[0]
            count = first["parameters"]
            peak = max(row["peak"] for row in rows)
            padding = max(row["padding"] for row in rows)
            bound = 14 * count / size + 2 * first["group"] + padding
            memory.append(
                [
                    str(size),
                    budget(name),
                    f"{14 * count / size:,.0f}",
                    f"{max(row['own'] for row in rows):,}",
                    f"{padding:,}",
                    f"{first['group']:,}",
                    f"{peak:,}",
                    f"{peak / bound:.3f}",
                ]
            )
            if size > 1:
                sent = sum(row["sent"] for row in rows) / size
                ideal = 6 * (size - 1) / size * count
                wire.append(
                    [
                        str(size),
                        budget(name),
                        f"{sum(row['gathered'] for row in rows) / size:,.0f}",
                        f"{sum(row['reduced'] for row in rows) / size:,.0f}",
                        f"{sent / (count * (size - 1) / size):.3f}",
                        f"{sum(row['wire'] for row in rows) / size / (count * (size - 1) / size):.3f}",
                        f"{sent / ideal:.3f}",
                        f"{sent / (6 * (size - 1) / size * first['padded']):.3f}",
                        str(first["rounds"]),
                    ]
                )
        if "pairs" in results[0]:
            pairs = results[0]["pairs"]
            ratios = sorted(fsdp[0] / ours[0] for fsdp, ours in pairs)
            count = results[0]["room"]["parameters"]
            seconds.append(
                [
                    str(size),
                    f"{median(fsdp[0] for fsdp, _ in pairs):.3f}",
                    f"{median(ours[0] for _, ours in pairs):.3f}",
                    f"{median(ratios):.3f}",
                    f"{ratios[0]:.3f} - {ratios[-1]:.3f}",
                    f"{median(fsdp[1] for fsdp, _ in pairs) / (count * (size - 1)):.3f}",
                    f"{median(ours[1] for _, ours in pairs) / (count * (size - 1)):.3f}",
                ]
            )
    shape = f"{options.model}, bf16, {options.batch} x {options.sequence} tokens per process and step, gloo"
    publish(
        "data_parallel_memory",
        "cpu",
        f"{shape}. Bytes of model data per process, for M parameters on p processes: the shard of a process, and the "
        f"peak on its host and device together, relative to the limit of 14 M/p + two groups + padding. With the whole "
        f"machine as budget, groups stay gathered and optimizer states may be placed on the device.",
        ["p", "device budget", "14 M/p", "shard", "of which padding", "largest group", "peak", "peak / limit"],
        memory,
    )
    publish(
        "data_parallel_wire",
        "cpu",
        f"{shape}. Bytes that a process sends per step. The limit without padding is 6 (p-1)/p M if nothing stays "
        f"gathered (two all-gathers and a reduce-scatter in 16 bit) and 4 (p-1)/p M if everything stays gathered from "
        f"forward to backward. Broadcast-based schemes send 10 (p-1)/p M. The embedding is tied to the head, so it is "
        f"used at both ends of forward; with memory for two groups it is gathered again.",
        [
            "p",
            "device budget",
            "parameters",
            "gradients",
            "sent / ((p-1)/p M)",
            "loopback bytes / ((p-1)/p M)",
            "sent / (6 (p-1)/p M)",
            "same, M with padding",
            "coordination steps",
        ],
        wire,
    )
    if seconds:
        publish(
            "data_parallel_time",
            "cpu",
            f"{shape}. Seconds per step if everything fits, alternating with FSDP2 (`fully_shard`) in the same "
            f"processes. Bytes are those of the loopback device, divided by (p-1)/p M.",
            ["p", "FSDP2 s", "engine s", "ratio (median of pairs)", "range", "FSDP2 bytes", "engine bytes"],
            seconds,
        )


if __name__ == "__main__":
    main()
