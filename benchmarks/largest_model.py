"""Plan the largest open model that trains on cards of 8, 12, 24 and 80 GB, with a dry run of each.

python benchmarks/largest_model.py
It takes half an hour, and nothing is measured. Writes results/largest_model.md, from which readme_table.py writes a
table of the README.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from report import publish_text, table

import patrickstar as ps
from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._perf_model.margins import CONTEXT_BYTES, device_budget
from patrickstar.errors import BudgetError

MODELS = {
    "qwen2.5-0.5b": "Qwen2.5 0.5B",
    "llama-3.2-1b": "Llama 3.2 1B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "llama-3.2-3b": "Llama 3.2 3B",
    "qwen3-4b": "Qwen3 4B",
    "llama-3-8b": "Llama 3 8B",
    "qwen3-14b": "Qwen3 14B",
    "gemma-2-27b": "Gemma 2 27B",
    "qwen3-32b": "Qwen3 32B",
    "llama-3-70b": "Llama 3 70B",
}
"""Open models by their names in `patrickstar plan`, the smallest first."""
SMALLEST, *_, LARGEST = MODELS.values()

SEQUENCE = 2048
DISK_BYTES = 2 * 10**12
DISK = f"{DISK_BYTES}B:7GB/s:5GB/s"
PLAIN_BYTES, MANAGED_BYTES = 16, 14
"""Bytes per parameter of plain PyTorch under autocast (weight, gradient, two moments in fp32), and of PatrickStar."""


@dataclass(frozen=True)
class Computer:
    """Computer with one card, described for `patrickstar plan`."""

    gpu: str
    card_gib: int
    host_gb: int
    described: str


COMPUTERS = (
    Computer("rtx4060", 8, 16, "RTX 4060, 8 GB"),
    Computer("rtx4070", 12, 32, "RTX 4070, 12 GB"),
    Computer("rtx4090", 24, 64, "RTX 4090, 24 GB"),
    Computer("h100", 80, 256, "H100, 80 GB"),
)

NONE = f"none from {SMALLEST} on"
COLUMNS = (
    *("card", "host memory", "disk", "plain PyTorch", "PatrickStar", "tokens/s", "s per step", "batch", "limit, s"),
    "the drive lasts",
)


@cache
def plan(computer: Computer, disk: bool, model: str, **more: Any) -> ps.Plan | None:
    """Return the plan of a model, without a dry run unless `more` says so; None if it does not fit."""
    try:
        return ps.plan(
            model,
            gpu=computer.gpu,
            host_memory=f"{computer.host_gb}GB",
            disk=DISK if disk else None,
            sequence=SEQUENCE,
            **{"dry_run": False, "tiled_loss": True} | more,
        )
    except BudgetError:
        return None


def fits(computer: Computer, disk: bool, model: str) -> bool:
    """Return whether a model fits the card, the host memory and the disk."""
    capacity_bytes = (computer.card_gib << 30) + computer.host_gb * 10**9 + disk * DISK_BYTES
    # Most models are too large by far: their plans are not needed.
    return MANAGED_BYTES * OPEN_MODELS[model].params <= capacity_bytes and plan(computer, disk, model) is not None


def fits_plain(computer: Computer, model: str) -> bool:
    """Return whether plain PyTorch holds the model data and activations of a model on the card."""
    card_bytes = device_budget((computer.card_gib << 30) - CONTEXT_BYTES)
    model_bytes = PLAIN_BYTES * OPEN_MODELS[model].params
    if model_bytes > card_bytes:
        return False
    found = plan(computer, False, model, batch=1, activation_checkpointing=True, tiled_loss=False)
    return found is not None and model_bytes + found.best.workload.non_model_bytes <= card_bytes


def largest(is_possible: Callable[[str], bool]) -> str | None:
    """Return the largest model that is possible."""
    return next((model for model in reversed(MODELS) if is_possible(model)), None)


def rows() -> Iterator[list[str]]:
    """Yield a row for each computer, without a disk and with one."""
    for computer in COMPUTERS:
        plain = largest(partial(fits_plain, computer))
        for disk in (False, True):
            model = largest(partial(fits, computer, disk))
            row = [computer.described, f"{computer.host_gb} GB", "2 TB" if disk else "", MODELS.get(plain or "", NONE)]
            found = plan(computer, disk, model, dry_run=True) if model is not None else None
            if model is None or found is None:
                yield [*row, NONE, "", "", "", "", ""]
                continue
            speed = [f"{found.tokens_per_s:,.0f}", f"{found.step_s:,.1f}"]
            limit = f"{found.bound_s:,.1f}: {found.limited_by}"
            # The steps after which the drive has been written as often as it may be, and their time.
            days = found.drive_days
            lasts = "" if days is None else f"{days * 86400 / found.step_s:,.0f} steps, {days:,.1f} days"
            yield [*row, MODELS[model], *speed, f"{found.batch} x {SEQUENCE:,}", limit, lasts]
            print(*row, *speed, flush=True)


def main() -> None:
    """Print the table and write it to results/."""
    publish_text(
        "largest_model",
        count=len(MODELS),
        smallest=SMALLEST,
        largest=LARGEST,
        sequence=SEQUENCE,
        plain_bytes=PLAIN_BYTES,
        managed_bytes=MANAGED_BYTES,
        table=table(list(rows()), COLUMNS),
    )


if __name__ == "__main__":
    main()
