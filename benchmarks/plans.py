"""Compare the engine's plans for large models with lower bounds of transferred bytes and step time.

python benchmarks/plans.py
Dry runs on machine specs give the engine's figures; a linear program gives the bounds. Only the duration of a dry run
is measured.
"""

import tempfile
import time
from itertools import product

import torch
from report import publish

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.simulation import simulate
from patrickstar._layout.byte_size import format_size
from patrickstar._models.model_source import find_model
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.perf_model import estimate, min_transfer_bytes
from patrickstar._plan.traced_model import language_model

CASES = (
    ("gpt-4b", "8xV100-32GB", 8, False),
    ("gpt-4b", "8xV100-32GB", 32, False),
    ("gpt-8b", "8xV100-32GB", 8, False),
    ("gpt-12b", "8xV100-32GB", 4, False),
    ("gpt-12b", "8xV100-32GB", 16, False),
    ("gpt-12b", "H200", 16, False),
    ("gpt-0.7b", "700-dollar-pc", 8, False),
    ("gpt-4b", "RTX4090-desktop", 8, True),
    ("gpt-8b", "RTX4090-desktop", 8, True),
)
"""Model, machine (one of its GPUs is used), sequences of 1024 tokens, and whether there is a disk."""


def row(name: str, machine_name: str, batch: int, disk: bool, clipped: bool, directory: str) -> list[str]:
    source, machine = find_model(name), find_machine(machine_name)
    if not disk:
        machine = machine.model_copy(update={"disk": None})
    model, _ = source.open(True)
    ids = torch.zeros(batch, 1024, dtype=torch.int64)

    def step(engine: ps.Engine) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss, update=not clipped)
        if clipped:
            engine.clip_grad_norm_(1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    work = language_model(source, 1024).workloads(machine)(batch, True)
    start = time.perf_counter()
    config = ps.Config(device="cpu", disk=ps.Disk(directory) if disk else None)
    report = simulate(Engine, model, config, step, machine)
    duration_s = time.perf_counter() - start
    min_link_bytes, min_disk_bytes = min_transfer_bytes(work, machine)
    stats = report.stats
    link_bytes = stats.h2d_bytes + stats.d2h_bytes
    disk_bytes = stats.disk_read_bytes + stats.disk_write_bytes
    best = estimate(work, machine)
    return [
        name,
        f"{machine_name}{', disk' if disk else ''}",
        f"{batch} x 1024",
        "clipped" if clipped else "update=True",
        *_compared(link_bytes, min_link_bytes),
        *_compared(disk_bytes, min_disk_bytes),
        f"{best.bound_s:.2f} s",
        f"{best.seconds:.2f} s",
        f"{report.seconds:.2f} s",
        f"{report.seconds / best.bound_s:.2f}",
        f"{duration_s:.1f} s",
    ]


def _compared(nbytes: int, bound: int) -> tuple[str, str]:
    return f"{format_size(nbytes)} / {format_size(bound)}", f"{nbytes / bound:.2f}" if bound else "-"


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for case, clipped in product(CASES, (True, False)):
            rows.append(row(*case, clipped, directory))
            print(rows[-1], flush=True)
    publish(
        "plans",
        torch.device("cpu"),
        "Dry runs of large GPTs on machine specs, one GPU, activation checkpointing, with gradients clipped or with "
        "update=True. Bytes per step: dry run / minimum of any plan, by a linear program. The bound is the time of the "
        "busiest resource; the estimate assumes full overlap; the dry run is this engine.",
        [
            "model",
            "machine",
            "batch",
            "step",
            "host-device bytes",
            "factor",
            "disk bytes",
            "factor",
            "bound",
            "estimate",
            "dry run",
            "dry run / bound",
            "dry run duration",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
