"""Measure training from disk: step time against plain PyTorch and against the hardware limit, and a large model.

python benchmarks/disk_training.py --directory DIR [--cases plain medium packed split durable bound large] [--rounds 3]
Cases: `plain` and `medium` (GPT-2 124M and 355M, parameters and optimizer states on disk, resident memory at most 1.6
and 2.7 GiB, against a plain PyTorch loop), `packed` (355M with packed pages against the same without, on this drive
and on slower ones), `split` (355M with split masters, packed too, against whole ones with `update=True`, likewise),
`durable` (355M with a checkpoint of each step that refers to pages on disk, against none),
`bound` (optimizer states on disk, step time against the slowest of compute, reads and writes),
`large` (2 billion parameters with 3 GiB of device and 4 GiB of host memory). Every run is a separate
process, so that its resident memory can be measured; the sides of a ratio alternate.
"""

import argparse
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fresh_processes import apart, resident_peak_bytes
from gpu_stages.shapes import materialize, pattern
from report import options, publish
from steps import gpt, seconds_of, tokens, train_step

import patrickstar as ps
from patrickstar._dry_run.machine_profile import ROUNDS, measure_disk
from patrickstar._engine.engine import Engine
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.machine_spec import DiskDrive
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.integrations.transformers._model_builder import parameters_on_meta
from patrickstar.testing import ReferenceTrainer

LEARNING_RATE = 1e-4
SEQUENCE = 256
HOST_MEMORY, PLAIN_STEPS = "240MiB", 7
"""Host budget, and steps of a run, of the cases with a plain loop beside."""
TURN_STEPS, TURNS = 5, 6
"""Steps of a turn, and turns, with checkpoints of each step and without."""
READ, WRITTEN, STALL = "disk_read_bytes", "disk_write_bytes", "stall_s"
"""Names of a step's statistics."""
BOUND_DEVICE = "1450MiB"
SHAPES: dict[str, dict[str, int]] = {
    "124m": {},
    "355m": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "2b": {"n_layer": 24, "n_embd": 2560, "n_head": 32},
}
"""What differs from GPT-2 124M."""
DEFAULTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1) | {"activation_function": "gelu_new"}
"""Those of transformers."""


def run(
    directory: Path,
    side: str,
    *,
    model: str,
    batch: int,
    steps: int,
    checkpointing: bool = False,
    device_memory: str | None = None,
    host_memory: str | None = None,
    max_norm: float | None = None,
    packed: bool = False,
    split: bool = False,
    rate: float | None = None,
    saves: bool = False,
    turns: int = 0,
    resumes: bool = False,
) -> dict[str, Any]:
    """Train in this process and return the measurements. `side`: "plain", "memory" or "disk".

    Args:
        split: Update in every backward, with split masters.
        rate: Bytes per second that the drive reads, and writes, at most; None: what it can.
        saves: Save a checkpoint of each step that refers to pages on disk.
        turns: After the steps, take TURN_STEPS with such checkpoints and as many without, so often by turns; `turns`
            are the seconds of both, without the first step of each.
        resumes: Load the newest one first. `load_s` are the seconds for it, `engine_s` those for the engine, and
            `held` the bytes of chunks in memory then.
    """
    if rate is not None:
        slow_down(rate)
    torch.manual_seed(0)
    with parameters_on_meta():
        built = gpt("gpt2-124m", checkpointing, **DEFAULTS, **SHAPES[model])
    ids = tokens("gpt2-124m", batch, SEQUENCE, seed=0)
    if side == "plain":
        fused = partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
        config = ps.Config(device="cpu", optimizer=fused)
        trainer = ReferenceTrainer(materialize(built, torch.device("cpu")), config)
    else:
        config = ps.Config(
            device="cpu",
            device_memory=device_memory,
            host_memory=host_memory,
            disk=None if side == "memory" else ps.Disk(directory=directory, packed=packed, durable=saves),
            optimizer=ps.AdamW(lr=LEARNING_RATE, weight_decay=0.01),
            update=ps.InBackward() if split else None,
        )
        started = time.perf_counter()
        trainer = Engine(built, config, weights=partial(pattern, built))
        engine_s = time.perf_counter() - started
    result: dict[str, Any] = {"seconds": [], "losses": [], "stats": []}
    checkpoints = ps.Checkpoints(directory / "steps", keep=1)
    if resumes:
        result |= {"load_s": seconds_of(lambda: checkpoints.load(trainer)), "engine_s": engine_s}
        found = trainer.inspect()
        result["held"] = found.device.chunk_bytes + found.host.chunk_bytes
    update = {"update": True} if max_norm is None and side != "plain" and not split else {}

    def step(saves: bool = saves) -> None:
        result["losses"].append(train_step(trainer, ids, max_norm=max_norm, **update).item())
        if saves:
            checkpoints.save(trainer, len(result["losses"]), wait=False)

    for _ in range(steps):
        result["seconds"].append(seconds_of(step))
        if side != "plain":
            result["stats"].append(trainer.stats.last)
    result["turns"] = []
    for _ in range(turns):
        both = []
        for saving in (True, False):
            both.append(sum([seconds_of(partial(step, saving)) for _ in range(TURN_STEPS)][1:]))
            trainer.finish_saving()
        result["turns"].append(both)
    if saves:
        trainer.finish_saving()
        newest = checkpoints.newest()
        result["copied"] = sum(file.stat().st_size for file in newest.iterdir() if file.suffix != ".chunks")
    result["rss"] = resident_peak_bytes()
    if side != "plain":
        result |= {"numel": trainer.layout.numel, "model_data": trainer.layout.model_data_bytes}
        trainer.close(keep=False)
    return result


def slow_down(rate: float) -> None:
    """Let the drive of this process transfer at most so many bytes per second in each direction."""
    move, lock, free_at = SwapFile._move, threading.Lock(), {"read": 0.0, "write": 0.0}

    def move_slowly(file: SwapFile, operation: str, offset: int, buffer: memoryview, nbytes: int, label: str) -> None:
        with lock:
            ends_at = free_at[operation] = max(time.perf_counter(), free_at[operation]) + nbytes / rate
        move(file, operation, offset, buffer, nbytes, label)
        time.sleep(max(0.0, ends_at - time.perf_counter()))

    SwapFile._move = move_slowly


def in_a_process(given: argparse.Namespace, side: str, **work: Any) -> dict[str, Any]:
    return apart(partial(run, **work), given.directory, side)


def steady(result: dict[str, Any], key: str = "") -> float:
    """Return the median of the seconds, or of a statistic.

    It is that over planned steps, except the first, which also writes data left by the warm-up.
    """
    values = [getattr(stats, key) for stats in result["stats"]] if key else result["seconds"]
    return median(values[3:] or values[1:])


def size(result: dict[str, Any], key: str) -> str:
    return format_size(int(steady(result, key)))


def sustained(directory: Path, result: dict[str, Any]) -> tuple[DiskDrive, float]:
    """Return the drive with its rates over as many bytes as a step moves, and the seconds of a step's bytes at these.

    A drive with a cache of fast cells may be faster for fewer.
    """
    read, written = steady(result, READ), steady(result, WRITTEN)
    chunk_bytes = -int(-max(read, written) // (ROUNDS * PAGE_BYTES)) * PAGE_BYTES
    drive = measure_disk(directory, chunk_bytes)
    return drive, max(read / drive.read, written / drive.write)


def against_plain(given: argparse.Namespace, *, case: str, model: str, device: str, rss: str, limit: float) -> None:
    """Compare with a plain loop; `limit`: of the ratio, without clipping and with it."""
    work = {"model": model, "batch": 2, "steps": PLAIN_STEPS}
    small = work | {"device_memory": device, "host_memory": HOST_MEMORY}
    sides = [("plain", work), ("disk", small), ("disk", small | {"max_norm": 1.0})]
    rounds = [[in_a_process(given, side, **each) for side, each in sides] for _ in range(given.rounds)]
    base, *ours = zip(*rounds, strict=True)
    rows = []
    for title, found in zip(("update=True", "global norm clipped"), ours, strict=True):
        ratios = sorted(steady(one) / steady(other) for one, other in zip(found, base, strict=True))
        last = found[-1]
        plain_s, step_s = (median(map(steady, side)) for side in (base, found))
        drive, drive_s = sustained(given.directory, last)
        rows.append(
            {
                "": title,
                "plain step": f"{plain_s:.2f} s",
                "our step": f"{step_s:.2f} s",
                "ratio (range)": f"{median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
                "limit": f"{limit}",
                "the drive alone": f"{drive_s:.2f} s at {drive.read / 1e9:.2f} / {drive.write / 1e9:.2f} GB/s",
                "the drive alone / plain": f"{drive_s / plain_s:.2f}",
                "our step / slower of both": f"{step_s / max(drive_s, plain_s):.2f}",
                "peak RSS": f"{format_size(max(each['rss'] for each in found))} of {rss}",
                "plain peak RSS": format_size(max(each["rss"] for each in base)),
                "read / written per step": f"{size(last, READ)} / {size(last, WRITTEN)}",
                "stall per step": f"{steady(last, STALL):.2f} s",
            }
        )
    publish(
        f"disk_training_{case}",
        f"GPT-2 {model.upper()}, vocabulary 50,257, 2 x {SEQUENCE} tokens, bf16, device budget {device}, host budget "
        f"{HOST_MEMORY}, the rest on disk. Plain: a PyTorch loop with fp32 masters and its fused AdamW, without "
        f"clipping. Medians of steps 4 to {PLAIN_STEPS}, then of {given.rounds} rounds; a round runs all sides. The "
        f"drive alone needs the time of a step's bytes, read and written at the same time at the rates that it has "
        f"over as many, measured after the rounds: where it is slower than a plain step, no step from disk reaches 1.",
        rows,
    )


Sides = dict[str, dict[str, Any]]
"""What differs in the work of each side of a comparison by turns, by title."""


def by_turns(given: argparse.Namespace, base: dict[str, Any], sides: Sides) -> list[dict[str, str]]:
    """Compare other ways to have pages on disk with one, by turns and with equal losses, on this drive and slower ones.

    Args:
        base: What differs in the work of the side that the others are compared with.
        sides: That of the others.
    """
    work = {"model": "355m", "batch": 2, "steps": PLAIN_STEPS, "device_memory": "1700MiB", "host_memory": HOST_MEMORY}
    rows = []
    for rate in (None, 1e9, 0.5e9):
        rounds = [
            [in_a_process(given, "disk", **work, **each, rate=rate) for each in (base, *sides.values())]
            for _ in range(given.rounds)
        ]
        first, *others = zip(*rounds, strict=True)
        row = {
            "drive": "this one" if rate is None else f"{rate / 1e9:.1f} GB/s each way",
            "step": f"{median(map(steady, first)):.2f} s",
            "read / written per step": f"{size(first[-1], READ)} / {size(first[-1], WRITTEN)}",
        }
        for title, found in zip(sides, others, strict=True):
            assert found[-1]["losses"] == first[-1]["losses"], f"{title} has changed a bit"
            ratios = sorted(steady(one) / steady(other) for one, other in zip(found, first, strict=True))
            nbytes = [sum(steady(each, key) for key in (READ, WRITTEN)) for each in (first[-1], found[-1])]
            row |= {
                title: f"{median(map(steady, found)):.2f} s",
                f"{title}, ratio (range)": f"{median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
                f"{title}, read / written": f"{size(found[-1], READ)} / {size(found[-1], WRITTEN)}",
                f"{title}, ratio of bytes": f"{nbytes[1] / nbytes[0]:.3f}",
            }
        rows.append(row)
    return rows


def packed(given: argparse.Namespace) -> None:
    """Compare packed pages with pages as they are."""
    publish(
        "disk_training_packed",
        f"GPT-2 355M, 2 x {SEQUENCE} tokens, bf16, clipped, device budget 1700 MiB, host budget {HOST_MEMORY}, the "
        f"rest on disk: pages as they are and packed, by turns, with equal losses. A slower drive is this one, whose "
        f"calls end as if it had that rate. Medians of steps 4 to {PLAIN_STEPS}, then of {given.rounds} rounds.",
        by_turns(given, {"max_norm": 1.0}, {"packed": {"max_norm": 1.0, "packed": True}}),
    )


def split(given: argparse.Namespace) -> None:
    """Compare split masters with whole ones, which are updated in backward, too."""
    sides: Sides = {"split": {"split": True}, "split and packed": {"split": True, "packed": True}}
    publish(
        "disk_training_split",
        f"GPT-2 355M, 2 x {SEQUENCE} tokens, device budget 1700 MiB, host budget {HOST_MEMORY}, the rest on disk: "
        f"whole masters (`update=True`), split ones (`ps.InBackward()`), and these with packed pages, by turns, with "
        f"equal losses. A slower drive is this one, whose calls end as if it had that rate. Medians of steps 4 to "
        f"{PLAIN_STEPS}, then of {given.rounds} rounds.",
        by_turns(given, {}, sides),
    )


def durable(given: argparse.Namespace) -> None:
    """Compare steps of which each has a checkpoint with steps without, by turns, and restart from the last one."""
    work = {"model": "355m", "batch": 2, "device_memory": "1700MiB", "host_memory": HOST_MEMORY, "max_norm": 1.0}
    base = in_a_process(given, "disk", **work, steps=PLAIN_STEPS)
    ours = in_a_process(given, "disk", **work, steps=PLAIN_STEPS, saves=True, turns=TURNS)
    assert base["losses"] == ours["losses"][:PLAIN_STEPS], "checkpoints have changed a bit"
    restarts = []
    for _ in range(given.rounds):
        restarts.append(in_a_process(given, "disk", **work, steps=1, saves=True, resumes=True))
        drive = measure_disk(given.directory)
        restarts[-1]["reading_s"] = restarts[-1]["held"] / drive.read
    shutil.rmtree(given.directory / "steps")
    ratios = sorted(saving / without for saving, without in ours["turns"])
    saving_s, without_s = (median(each) / (TURN_STEPS - 1) for each in zip(*ours["turns"], strict=True))
    written = [steady(each, WRITTEN) for each in (base, ours)]
    load_s, engine_s, reading_s = (
        median(each[key] for each in restarts) for key in ("load_s", "engine_s", "reading_s")
    )
    row = {
        "step": f"{without_s:.2f} s",
        "with checkpoints": f"{saving_s:.2f} s",
        "ratio (range)": f"{median(ratios):.3f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
        "limit": "1.03",
        "written per step": format_size(int(written[0])),
        "with checkpoints, to the swap file": format_size(int(written[1])),
        "beside it": format_size(ours["copied"]),
        "ratio of bytes": f"{(written[1] + ours['copied']) / written[0]:.3f}",
        "load": f"{load_s:.2f} s",
        "reading what memory holds": f"{reading_s:.2f} s ({format_size(restarts[-1]['held'])})",
        "load / reading": f"{load_s / reading_s:.2f} (limit 1.5)",
        "engine before it": f"{engine_s:.1f} s",
    }
    publish(
        "disk_training_durable",
        f"GPT-2 355M, 2 x {SEQUENCE} tokens, bf16, clipped, device budget 1700 MiB, host budget {HOST_MEMORY}, the "
        f"rest on disk: steps without checkpoints, and with one of each step that refers to pages on disk "
        f"(`ps.Disk(durable=True)`, `ps.Checkpoints(keep=1)`, in the background), {TURN_STEPS} and {TURN_STEPS} by "
        f"turns in one engine, {TURNS} times; the first step of each turn is not counted. Losses equal those of a run "
        f"without `durable`, whose bytes are compared. Load: of the last checkpoint, in a new process, whose engine "
        f"reads pages where they are; beside it the time to read the bytes of chunks in memory at the drive's rate, "
        f"and the time to create the engine, with initial values. Medians of {given.rounds} restarts.",
        [row],
    )


def bound(given: argparse.Namespace) -> None:
    work = {"model": "124m", "batch": 8, "steps": 6, "checkpointing": True, "device_memory": BOUND_DEVICE}
    rows = []
    for _ in range(given.rounds):
        rates = measure_disk(given.directory)
        memory = in_a_process(given, "memory", **work, host_memory="4GiB")
        disk = in_a_process(given, "disk", **work, host_memory="240MiB")
        by_rate = {READ: rates.read, WRITTEN: rates.write}
        terms = {key: steady(disk, key) / rate for key, rate in by_rate.items()}
        slowest_s = max(steady(memory), *terms.values())
        row = {"compute": f"{steady(memory):.2f} s"}
        for name, (key, rate) in zip(("read", "written"), by_rate.items(), strict=True):
            row[name] = f"{terms[key]:.2f} s ({size(disk, key)} at {rate / 1e9:.2f} GB/s)"
        row |= {"step": f"{steady(disk):.2f} s", "step / slowest": f"{steady(disk) / slowest_s:.2f}", "limit": "1.15"}
        rows.append(row | {"stall per step": f"{steady(disk, STALL):.2f} s"})
    publish(
        "disk_training_bound",
        f"GPT-2 124M, 8 x {SEQUENCE} tokens, checkpointing, bf16, device budget {BOUND_DEVICE}: step with all "
        f"optimizer states on disk, compared with the same engine and budget with the states in RAM (compute), and "
        f"with the read and write times at the measured disk rates. One row per round; medians of steps 4 to 6.",
        rows,
    )


def large(given: argparse.Namespace) -> None:
    budgets = {"device_memory": "3GiB", "host_memory": "4GiB"}
    result = in_a_process(given, "disk", model="2b", batch=1, steps=2, checkpointing=True, **budgets)
    last = result["stats"][-1]
    activations = max(stats.device_peak_non_model_bytes for stats in result["stats"])
    row = {
        "parameters": f"{result['numel']:,}",
        "model data": format_size(result["model_data"]),
        "steps": " / ".join(f"{seconds:.1f} s" for seconds in result["seconds"]),
        "losses": " / ".join(f"{loss:.3f}" for loss in result["losses"]),
        "peak RSS of limit": f"{format_size(result['rss'])} of 8.50 GiB",
        "device": format_size(last.device_peak_model_bytes),
        "host": f"{format_size(last.host_peak_model_bytes)} + {format_size(last.host_peak_non_model_bytes)} of pages",
        "disk": format_size(last.disk_bytes),
        "activations": format_size(activations),
        "read in step 2": format_size(last.disk_read_bytes),
        "written in step 2": format_size(last.disk_write_bytes),
        "stall in step 2": f"{last.stall_s:.1f} s",
    }
    publish(
        "disk_training_large",
        f"A GPT of 24 layers x 2560, vocabulary 50,257, 1 x {SEQUENCE} tokens, checkpointing, bf16; device budget 3 "
        f"GiB, host budget 4 GiB, the rest on disk.",
        [row],
    )


CASES = {
    "plain": partial(against_plain, case="plain", model="124m", device="850MiB", rss="1.60 GiB", limit=1.05),
    "medium": partial(against_plain, case="medium", model="355m", device="1700MiB", rss="2.70 GiB", limit=1.12),
    "packed": packed,
    "split": split,
    "durable": durable,
    "bound": bound,
    "large": large,
}


def main() -> None:
    given = options(__doc__, directory=Path, cases=list(CASES), rounds=3)
    for name in given.cases:
        CASES[name](given)


if __name__ == "__main__":
    main()
