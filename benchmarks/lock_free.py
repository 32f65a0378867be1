"""Measure lock-free updates on a disk that is four times too slow for the exact step.

python benchmarks/lock_free.py --directory DIR [--steps 12]
GPT-2 with 89 million parameters, most of whose optimizer states are on disk. The rate of the disk is limited in
software: to read and write all states takes four times as long as the step does in memory.
"""

from collections.abc import Iterator
from functools import partial
from statistics import mean, median

import torch
from disk_training import SEQUENCE, build, shape, value_of
from report import options, publish
from steps import seconds_of, train_step
from throttle import throttled

import patrickstar as ps
from patrickstar._perf_model.workload import STATE_BYTES

MODEL = "89m"
BATCHES = 2, 8
DEVICE_BYTES = 900 << 20
"""All parameters and activations."""
STAGING_BYTES = 200 << 20
"""Host memory for pages in flight and a few states: too little for more."""
SLOWER = 4


def run(
    batch: int, directory: str | None, update: ps.LockFree | None, host_bytes: int, rate: float | None, steps: int
) -> tuple[list[float], list[ps.StepStats], int]:
    """Train; return the seconds and statistics of the steps after the first three, and the number of parameters."""
    torch.manual_seed(0)
    ids = torch.randint(0, shape(MODEL).vocab_size, (batch, SEQUENCE))
    model = build(MODEL, True)
    config = ps.Config(
        device="cpu",
        device_memory=DEVICE_BYTES,
        host_memory=host_bytes,
        disk=None if directory is None else ps.Disk(directory),
        optimizer=ps.AdamW(lr=1e-4, weight_decay=0.01),
        update=update,
    )
    with throttled(rate), ps.Engine(model, config, weights=partial(value_of, model)) as engine:
        seconds, stats = [], []
        for _ in range(steps + 3):
            seconds.append(seconds_of(lambda: train_step(engine, ids, max_norm=1.0)))
            stats.append(engine.stats.last)
            print(f"{seconds[-1]:.2f} s, {stats[-1].staleness:.2f}", flush=True)
        numel = engine.layout.numel
        engine.close(keep=False)
    return seconds[3:], stats[3:], numel


def rows_of(batch: int, directory: str, steps: int) -> Iterator[dict[str, str]]:
    """Yield the rows of one batch size."""
    seconds, _, numel = run(batch, None, None, 4 << 30, None, 4)
    compute_s = median(seconds)
    rate = 2 * STATE_BYTES * numel / compute_s / SLOWER
    row = {"batch": str(batch), "update": "in memory", "disk, MB/s": "-", "host memory, MiB": "-"}
    row |= {"s": f"{compute_s:.2f}", "/ in memory": "1.00"}
    yield row | dict.fromkeys(("disk, MiB", "staleness", "at most"), "-")
    cases: list[tuple[str, ps.LockFree | None, int, int]] = [("exact", None, STAGING_BYTES, 3)]
    buffer_bytes = 6 * numel * 102 // 100  # padding
    for most in (4, 6, 8):
        update = ps.LockFree(after=1, max_staleness=most)
        cases.append((f"lock-free, max_staleness={most}", update, buffer_bytes + STAGING_BYTES, steps))
    for name, update, host_bytes, count in cases:
        seconds, stats, _ = run(batch, directory, update, host_bytes, rate, count)
        moved = mean(each.disk_read_bytes + each.disk_write_bytes for each in stats)
        yield {
            "batch": str(batch),
            "update": name,
            "disk, MB/s": f"{rate / 1e6:.0f}",
            "host memory, MiB": f"{host_bytes / 2**20:.0f}",
            "s": f"{mean(seconds):.2f}",
            "/ in memory": f"{mean(seconds) / compute_s:.2f}",
            "disk, MiB": f"{moved / 2**20:.0f}",
            "staleness": f"{mean(each.staleness for each in stats):.2f}",
            "at most": str(max(each.peak_staleness for each in stats)),
        }


def main() -> None:
    given = options(__doc__, directory=str, steps=12)
    publish(
        "lock_free",
        "cpu",
        f"Step of GPT-2 with 89 million parameters (sequences of {SEQUENCE} tokens, activation checkpointing, bf16, "
        f"AdamW, clipped), mean of {given.steps} steps after three (exact: of 3). The disk is limited in software, for "
        f"reads and writes together, to a quarter of the rate that hides a read and a write of all optimizer states "
        f"behind the step in memory. The exact step has some of them in the memory that operators leave. Limit of a "
        f"lock-free step: that in memory.",
        [row for batch in BATCHES for row in rows_of(batch, given.directory, given.steps)],
    )


if __name__ == "__main__":
    main()
