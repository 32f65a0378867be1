"""Measure lock-free updates on a disk that is four times too slow for the exact step.

python benchmarks/lock_free.py --directory DIR [--steps 12]
GPT-2 with 89 million parameters, most of whose optimizer states are on disk. The rate of the disk is limited in
software: to read and write all states takes four times as long as the step does in memory.
"""

import argparse
import time
from statistics import mean, median

import torch
from disk_training import build, shape, value_of
from report import publish
from throttle import throttled

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._perf_model.workload import STATE_BYTES

MODEL, SEQUENCE = "89m", 256
BATCHES = 2, 8
DEVICE_BYTES = 900 << 20
"""All parameters and activations."""
STAGING_BYTES = 200 << 20
"""Host memory for pages in flight and a few states: too little for more."""
SLOWER = 4


def run(
    batch: int, directory: str | None, update: ps.LockFree | None, host_bytes: int, rate: float | None, steps: int
) -> dict:
    """Train; return the seconds and statistics of the steps after the first three."""
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
    with throttled(rate), Engine(model, config, weights=lambda name: value_of(model, name)) as engine:
        seconds, stats = [], []
        for _ in range(steps + 3):
            start = time.perf_counter()
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.clip_grad_norm_(1.0)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            stats.append(engine.stats.last)
            print(f"{seconds[-1]:.2f} s, {stats[-1].staleness:.2f}", flush=True)
        numel = engine.layout.numel
        engine.close(keep=False)
    return {"seconds": seconds[3:], "stats": stats[3:], "numel": numel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    rows = [row for batch in BATCHES for row in table(batch, options.directory, options.steps)]
    publish(
        "lock_free",
        "cpu",
        f"Step of GPT-2 with 89 million parameters (sequences of {SEQUENCE} tokens, activation checkpointing, bf16, "
        f"AdamW, clipped), mean of {options.steps} steps after three (exact: of 3). The disk is limited in software, "
        f"for reads and writes together, to a quarter of the rate that hides a read and a write of all optimizer "
        f"states behind the step in memory. The exact step has some of them in the memory that operators leave. Limit "
        f"of a lock-free step: that in memory.",
        ["batch", "update", "disk, MB/s", "host memory, MiB", "s", "/ in memory", "disk, MiB", "staleness", "at most"],
        rows,
    )


def table(batch: int, directory: str, steps: int) -> list[list[str]]:
    """Return the rows of one batch size."""
    memory = run(batch, None, None, 4 << 30, None, 4)
    compute_s, numel = median(memory["seconds"]), memory["numel"]
    buffer_bytes = 6 * numel * 102 // 100  # padding
    rows = [[str(batch), "in memory", "-", "-", f"{compute_s:.2f}", "1.00", "-", "-", "-"]]
    rate = 2 * STATE_BYTES * numel / compute_s / SLOWER
    cases: list[tuple[str, ps.LockFree | None, int, int]] = [("exact", None, STAGING_BYTES, 3)]
    for most in (4, 6, 8):
        update = ps.LockFree(after=1, max_staleness=most)
        cases.append((f"lock-free, max_staleness={most}", update, buffer_bytes + STAGING_BYTES, steps))
    for name, update, host_bytes, count in cases:
        found = run(batch, directory, update, host_bytes, rate, count)
        seconds, stats = found["seconds"], found["stats"]
        moved = mean(each.disk_read_bytes + each.disk_write_bytes for each in stats)
        figures = [rate / 1e6, host_bytes / 2**20]
        late = [f"{mean(each.staleness for each in stats):.2f}", str(max(each.peak_staleness for each in stats))]
        rows.append(
            [
                str(batch),
                name,
                *(f"{figure:.0f}" for figure in figures),
                f"{mean(seconds):.2f}",
                f"{mean(seconds) / compute_s:.2f}",
                f"{moved / 2**20:.0f}",
                *late,
            ]
        )
    return rows


if __name__ == "__main__":
    main()
