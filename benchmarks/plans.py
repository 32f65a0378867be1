"""How far the engine's plans for large models are from what no plan can be below: bytes moved, and seconds.

python benchmarks/plans.py
Nothing is measured but how long a rehearsal takes: the engine trains each model without bytes on a machine that is only
described, and a linear program says what the fewest bytes are.
"""

import tempfile
import time

import torch
from report import publish

import patrickstar as ps
from patrickstar._cli.model_source import find_model
from patrickstar._cli.train import language_model_workloads
from patrickstar._engine.dry_run import dry_run
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.perf_model import estimate, min_transfer_bytes

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
"""Model, machine of which one GPU is used, sequences of 1024 tokens, and whether there is a disk."""


def row(name: str, place: str, batch: int, disk: bool, directory: str) -> list[str]:
    source, machine = find_model(name), find_machine(place)
    if not disk:
        machine = machine.model_copy(update={"disk": None})
    model, _ = source.open(True)
    ids = torch.zeros(batch, 1024, dtype=torch.int64)

    def step(engine: ps.Engine) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss, update=True)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    work = language_model_workloads(source, 1024, machine)(batch, True)
    start = time.perf_counter()
    config = ps.Config(device="cpu", disk=ps.Disk(directory) if disk else None)
    found = dry_run(model, config, step, machine)
    took = time.perf_counter() - start
    crossed, paged = min_transfer_bytes(work, machine)
    stats = found.stats
    moved = stats.h2d_bytes + stats.d2h_bytes
    on_disk = stats.disk_read_bytes + stats.disk_write_bytes
    best = estimate(work, machine)
    return [
        name,
        f"{place}{', disk' if disk else ''}",
        f"{batch} x 1024",
        *_compared(moved, crossed),
        *_compared(on_disk, paged),
        f"{best.bound_s:.2f} s",
        f"{best.seconds:.2f} s",
        f"{found.seconds:.2f} s",
        f"{found.seconds / best.bound_s:.2f}",
        f"{took:.1f} s",
    ]


def _compared(moved: int, fewest: int) -> tuple[str, str]:
    return f"{format_size(moved)} / {format_size(fewest)}", f"{moved / fewest:.2f}" if fewest else "-"


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            rows.append(row(*case, directory))
            print(rows[-1], flush=True)
    publish(
        "plans",
        torch.device("cpu"),
        "Plans of the engine for large GPTs on described machines, one GPU, activations computed again, update=True; "
        "bytes of a step, planned / the fewest of any plan by a linear program. The bound is the busiest resource, the "
        "estimate has all overlapped, and a rehearsal is this engine.",
        [
            "model",
            "machine",
            "batch",
            "host and device",
            "factor",
            "disk",
            "factor",
            "bound",
            "estimate",
            "rehearsal",
            "rehearsal / bound",
            "planning takes",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
