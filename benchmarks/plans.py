"""Compare the engine's plans for large models with lower bounds of transferred bytes and step time.

python benchmarks/plans.py
Dry runs on machine specs give the engine's figures; a linear program gives the bounds. Only the duration of a dry run
is measured.
"""

import tempfile
import time
from itertools import product

from dry_runs import builder_of, dry_run, without_disk
from report import publish, shown
from transfer_bounds import min_transfer_bytes

import patrickstar as ps
from patrickstar._layout.byte_size import format_size
from patrickstar._models.model_source import find_model
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.perf_model import estimate
from patrickstar._plan.traced_model import language_model

SEQUENCE = 1024
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
"""Model, machine (one of its GPUs is used), sequences, and whether there is a disk."""


def row(name: str, machine_name: str, batch: int, disk: bool, clipped: bool, directory: str) -> list[str]:
    machine = find_machine(machine_name) if disk else without_disk(machine_name)
    work = language_model(find_model(name), SEQUENCE).workloads(machine)(batch, True)
    start = time.perf_counter()
    # With fp16, which "auto" takes on a V100, update=True is refused.
    config = {"precision": "bf16", "disk": ps.Disk(directory) if disk else None}
    report = dry_run(builder_of(name), machine, batch, SEQUENCE, clipped, **config)
    duration_s = time.perf_counter() - start
    stats, best = report.stats, estimate(work, machine)
    moved = stats.h2d_bytes + stats.d2h_bytes, stats.disk_read_bytes + stats.disk_write_bytes
    return [
        name,
        f"{machine_name}{', disk' if disk else ''}",
        f"{batch} x {SEQUENCE}",
        "clipped" if clipped else "update=True",
        *(cell for pair in zip(moved, min_transfer_bytes(work, machine), strict=True) for cell in _compared(*pair)),
        *(f"{seconds:.2f} s" for seconds in (best.bound_s, best.seconds, report.seconds)),
        f"{report.seconds / best.bound_s:.2f}",
        f"{duration_s:.1f} s",
    ]


def _compared(nbytes: int, bound: int) -> tuple[str, str]:
    return f"{format_size(nbytes)} / {format_size(bound)}", f"{nbytes / bound:.2f}" if bound else "-"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = shown(row(*case, clipped, directory) for case, clipped in product(CASES, (True, False)))
    publish(
        "plans",
        "Dry runs of large GPTs on machine specs, one GPU, activation checkpointing, with gradients clipped or with "
        "update=True. Bytes per step: dry run / minimum of any plan, by a linear program. The bound is the time of the "
        "busiest resource; the estimate assumes full overlap; the dry run is this engine.",
        rows,
        [
            *("model", "machine", "batch", "step", "host-device bytes", "factor", "disk bytes", "factor", "bound"),
            *("estimate", "dry run", "dry run / bound", "dry run duration"),
        ],
    )


if __name__ == "__main__":
    main()
