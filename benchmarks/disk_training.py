"""Measure training from disk: step time against plain PyTorch and against the hardware limit, and a large model.

python benchmarks/disk_training.py --directory DIR [--case all] [--rounds 3]
Cases: `plain` and `medium` (GPT-2 124M and 355M, parameters and optimizer states on disk, resident memory at most 1.6
and 2.7 GiB, against a plain PyTorch loop), `bound` (optimizer states on disk, step time against the slowest of compute,
reads and writes), `ahead` (stalls with prefetch on and off), `large` (2 billion parameters with 3 GiB of device and
4 GiB of host memory). Every run is a separate process, so that its resident memory can be measured; the sides of a
ratio alternate.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from report import publish
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar as ps
from patrickstar._dry_run.machine_profile import measure_disk
from patrickstar._engine.engine import Engine
from patrickstar._layout.byte_size import format_size
from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch
from patrickstar.testing import ReferenceTrainer

LEARNING_RATE = 1e-4


def shape(name: str) -> GPT2Config:
    layers, width, heads, words = {
        "89m": (12, 768, 12, 4096),
        "124m": (12, 768, 12, 50257),
        "355m": (24, 1024, 16, 50257),
        "2b": (24, 2560, 32, 50257),
    }[name]
    return GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, use_cache=False)


def build(name: str, checkpointing: bool, device: str = "meta") -> GPT2LMHeadModel:
    with torch.device(device):
        model = GPT2LMHeadModel(shape(name)).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def value_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the initial value of one parameter, the same in every process."""
    param = dict(model.named_parameters())[name]
    if param.dim() < 2:
        return torch.ones(param.shape) if name.endswith("weight") else torch.zeros(param.shape)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.empty(param.shape).normal_(std=0.02, generator=generator)


def resident_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(options: argparse.Namespace) -> dict[str, object]:
    """Train in this process and return the measurements."""
    libraries = resident_peak_bytes()
    torch.manual_seed(0)
    ids = torch.randint(
        0,
        shape(options.model).vocab_size,
        (options.batch, options.sequence),
        generator=torch.Generator().manual_seed(0),
    )
    if options.side == "plain":
        model = build(options.model, options.checkpointing, "cpu")
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(value_of(model, name))
        fused = partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
        trainer = ReferenceTrainer(model, ps.Config(device="cpu", optimizer=fused))
        optimizer = trainer.optimizer
    else:
        model = build(options.model, options.checkpointing)
        disk = None if options.side == "memory" else ps.Disk(directory=options.directory)
        config = ps.Config(
            device="cpu",
            device_memory=options.device_memory,
            host_memory=options.host_memory,
            disk=disk,
            optimizer=ps.AdamW(lr=LEARNING_RATE, weight_decay=0.01),
        )
        policy = {"ahead": AggressivePrefetch, "demand": DemandFetch}.get(options.side)
        trainer = Engine(model, config, weights=partial(value_of, model), prefetch_policy=policy)
        optimizer = trainer.optimizer
    seconds, losses, steps = [], [], []
    update = {"update": True} if options.max_norm == 0 and options.side != "plain" else {}
    for _ in range(options.steps):
        start = time.perf_counter()
        loss = trainer(input_ids=ids, labels=ids).loss
        trainer.backward(loss, **update)
        if options.max_norm:
            trainer.clip_grad_norm_(options.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if options.side != "plain":
            steps.append(trainer.stats.last)
    result: dict[str, object] = {
        "seconds": seconds,
        "losses": losses,
        "rss": resident_peak_bytes(),
        "libraries": libraries,
    }
    if steps:
        last = steps[-1]
        result |= {
            "numel": trainer.layout.numel,
            "model_data": trainer.layout.model_data_bytes,
            "device_peak": last.device_peak_model_bytes,
            "non_model": max(step.device_peak_non_model_bytes for step in steps),
            "host_peak": last.host_peak_model_bytes,
            "host_pages": last.host_peak_non_model_bytes,
            "disk": last.disk_bytes,
            "read": [step.disk_read_bytes for step in steps],
            "written": [step.disk_write_bytes for step in steps],
            "moved": [step.h2d_bytes + step.d2h_bytes for step in steps],
            "stall": [step.stall_s for step in steps],
        }
        trainer.close(keep=False)
    return result


def in_a_process(options: argparse.Namespace, side: str, **changed: object) -> dict:
    values = {"directory": options.directory, "side": side} | changed
    arguments = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "--run", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict = json.loads(done.stdout.splitlines()[-1])
    return result


def steady(result: dict, key: str = "seconds") -> float:
    """Return the median over planned steps, except the first, which also writes data left by the warm-up."""
    return median(result[key][3:] or result[key][1:])


def against_plain(
    options: argparse.Namespace, case: str, model: str, device_memory: str, rss: str, limits: tuple[float, float]
) -> None:
    """Compare with a plain loop; `limits`: of the ratio without clipping and with it."""
    work = {"model": model, "batch": 2, "sequence": 256, "steps": options.plain_steps}
    small = {"device_memory": device_memory, "host_memory": options.host_memory}
    rounds = []
    for _ in range(options.rounds):
        rounds.append(
            (
                in_a_process(options, "plain", **work),
                in_a_process(options, "disk", **work, **small),
                in_a_process(options, "disk", **work, **small, max_norm=1.0),
            )
        )
    rows = []
    for title, base, ours, limit in (("update=True", 0, 1, limits[0]), ("global norm clipped", 0, 2, limits[1])):
        ratios = sorted(steady(results[ours]) / steady(results[base]) for results in rounds)
        last = rounds[-1][ours]
        rows.append(
            [
                title,
                f"{median(steady(results[base]) for results in rounds):.2f} s",
                f"{median(steady(results[ours]) for results in rounds):.2f} s",
                f"{median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
                f"{limit}",
                f"{format_size(max(results[ours]['rss'] for results in rounds))} of {rss}",
                format_size(max(results[base]["rss"] for results in rounds)),
                f"{format_size(int(steady(last, 'read')))} / {format_size(int(steady(last, 'written')))}",
                f"{steady(last, 'stall'):.2f} s",
            ]
        )
    publish(
        f"disk_training_{case}",
        "cpu",
        f"GPT-2 {model.upper()}, vocabulary 50,257, 2 x 256 tokens, bf16, device budget {device_memory}, host budget "
        f"{options.host_memory}, the rest on disk. Plain: a PyTorch loop with fp32 masters and its fused AdamW, "
        f"without clipping. Medians of steps 4 to {options.plain_steps}, then of {options.rounds} rounds; a round "
        f"runs all sides.",
        ["", "plain step", "our step", "ratio (range)", "limit", "peak RSS", "plain peak RSS",
         "read / written per step", "stall per step"],
        rows,
    )  # fmt: skip


def plain(options: argparse.Namespace) -> None:
    against_plain(options, "plain", "124m", options.device_memory, "1.60 GiB", (1.05, 1.05))


def medium(options: argparse.Namespace) -> None:
    against_plain(options, "medium", "355m", options.medium_device, "2.70 GiB", (1.12, 1.12))


def bound(options: argparse.Namespace) -> None:
    work = {"model": "124m", "batch": 8, "sequence": 256, "steps": 6, "checkpointing": 1}
    rounds = []
    for _ in range(options.rounds):
        rates = measure_disk(options.directory)
        memory = in_a_process(options, "memory", **work, device_memory=options.bound_device, host_memory="4GiB")
        disk = in_a_process(options, "disk", **work, device_memory=options.bound_device, host_memory="240MiB")
        rounds.append((rates, memory, disk))
    rows = []
    for rates, memory, disk in rounds:
        terms = (
            steady(memory),
            steady(disk, "read") / rates.read,
            steady(disk, "written") / rates.write,
        )
        rows.append(
            [
                f"{terms[0]:.2f} s",
                f"{terms[1]:.2f} s ({format_size(int(steady(disk, 'read')))} at {rates.read / 1e9:.2f} GB/s)",
                f"{terms[2]:.2f} s ({format_size(int(steady(disk, 'written')))} at {rates.write / 1e9:.2f} GB/s)",
                f"{steady(disk):.2f} s",
                f"{steady(disk) / max(terms):.2f}",
                "1.15",
                f"{steady(disk, 'stall'):.2f} s",
            ]
        )
    publish(
        "disk_training_bound",
        "cpu",
        f"GPT-2 124M, 8 x 256 tokens, checkpointing, bf16, device budget {options.bound_device}: step with all "
        f"optimizer states on disk, compared with the same engine and budget with the states in RAM (compute), and "
        f"with the read and write times at the measured disk rates. One row per round; medians of steps 4 to 6.",
        ["compute", "read", "written", "step", "step / slowest", "limit", "stall per step"],
        rows,
    )


def ahead(options: argparse.Namespace) -> None:
    work = {"model": "89m", "batch": 4, "sequence": 256, "steps": 7, "checkpointing": 1}
    # Memory for a quarter of the model data, plus activations.
    small = {"device_memory": options.quarter_device, "host_memory": options.quarter_host}
    rows = []
    for _ in range(options.rounds):
        off = in_a_process(options, "demand", **work, **small)
        on = in_a_process(options, "ahead", **work, **small)
        rows.append(
            [
                f"{steady(off, 'stall'):.2f} s",
                f"{steady(on, 'stall'):.2f} s",
                f"{steady(off, 'stall') / max(1e-9, steady(on, 'stall')):.1f}",
                "5",
                f"{steady(off):.2f} s / {steady(on):.2f} s",
                f"{format_size(int(steady(off, 'read')))} / {format_size(int(steady(off, 'written')))}",
                f"{format_size(int(steady(on, 'read')))} / {format_size(int(steady(on, 'written')))}",
                format_size(on["device_peak"] + on["host_peak"] + on["host_pages"])
                + f" of {format_size(on['model_data'])}",
            ]
        )
    publish(
        "disk_training_ahead",
        "cpu",
        f"GPT-2 with 12 layers, vocabulary 4,096 (89M), 4 x 256 tokens, checkpointing, bf16, device "
        f"{options.quarter_device}, host {options.quarter_host}: on-demand fetches (off) against prefetch by next use "
        f"and read-ahead of optimizer pages (on). One row per round; medians of steps 4 to 7.",
        ["stall, off", "stall, on", "ratio", "limit", "step, off / on", "read / written, off", "read / written, on",
         "peak in memory of model data"],
        rows,
    )  # fmt: skip


def large(options: argparse.Namespace) -> None:
    result = in_a_process(
        options, "disk", model="2b", batch=1, sequence=256, steps=2, checkpointing=1,
        device_memory="3GiB", host_memory="4GiB",
    )  # fmt: skip
    publish(
        "disk_training_large",
        "cpu",
        "A GPT of 24 layers x 2560, vocabulary 50,257, 1 x 256 tokens, checkpointing, bf16; device budget 3 GiB, host "
        "budget 4 GiB, the rest on disk.",
        ["parameters", "model data", "steps", "losses", "peak RSS of limit", "device", "host", "disk", "activations",
         "read in step 2", "written in step 2", "stall in step 2"],
        [[
            f"{result['numel']:,}",
            format_size(result["model_data"]),
            " / ".join(f"{seconds:.1f} s" for seconds in result["seconds"]),
            " / ".join(f"{loss:.3f}" for loss in result["losses"]),
            f"{format_size(result['rss'])} of 8.50 GiB",
            format_size(result["device_peak"]),
            f"{format_size(result['host_peak'])} + {format_size(result['host_pages'])} of pages",
            format_size(result["disk"]),
            format_size(result["non_model"]),
            format_size(result["read"][1]),
            format_size(result["written"][1]),
            f"{result['stall'][1]:.1f} s",
        ]],
    )  # fmt: skip


CASES = {"plain": plain, "medium": medium, "bound": bound, "ahead": ahead, "large": large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--case", default="all", choices=["all", *CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device-memory", default="850MiB")
    parser.add_argument("--medium-device", default="1700MiB")
    parser.add_argument("--plain-steps", type=int, default=7)
    parser.add_argument("--host-memory", default="240MiB")
    parser.add_argument("--bound-device", default="1450MiB")
    parser.add_argument("--quarter-device", default="375MiB")
    parser.add_argument("--quarter-host", default="150MiB")
    for name in ("run", "side", "model", "batch", "sequence", "steps", "checkpointing", "max_norm"):
        kind = {"side": str, "model": str, "max_norm": float}.get(name, int)
        option = "--" + name.replace("_", "-")
        if name == "run":
            parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
        else:
            parser.add_argument(option, type=kind, default=kind(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options)))
        return
    for name, case in CASES.items():
        if options.case in ("all", name):
            case(options)


if __name__ == "__main__":
    main()
