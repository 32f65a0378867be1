"""Measure lock-free updates on a disk that is four times too slow for the exact step.

python benchmarks/lock_free.py --directory DIR [--steps 12]
GPT-2 with 89 million parameters, whose optimizer states are all on disk. The rate of the disk is limited in software:
reads and writes of a step together take four times as long as the same step does in memory.
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

MODEL, BATCH, SEQUENCE = "89m", 2, 256
DEVICE_BYTES = 900 << 20
"""All parameters and activations."""
STAGING_BYTES = 200 << 20
"""Host memory for pages in flight and a few states: too little for more."""
SLOWER = 4


def run(directory: str | None, update: ps.LockFree | None, host_bytes: int, rate: float | None, steps: int) -> dict:
    """Train; return the seconds and statistics of the steps after the first three."""
    torch.manual_seed(0)
    ids = torch.randint(0, shape(MODEL).vocab_size, (BATCH, SEQUENCE))
    model = build(MODEL, False)
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
    memory = run(None, None, 4 << 30, None, 4)
    compute_s, numel = median(memory["seconds"]), memory["numel"]
    buffer_bytes = 6 * numel * 102 // 100  # padding
    rows = [["in memory", "-", f"{compute_s:.2f}", "1.00", "-", "-", "-"]]
    exact = run(options.directory, None, STAGING_BYTES, None, 2)
    needed = mean(each.disk_read_bytes + each.disk_write_bytes for each in exact["stats"]) / compute_s
    rate = needed / SLOWER
    cases: list[tuple[str, ps.LockFree | None, int, int]] = [("exact", None, STAGING_BYTES, 3)]
    for most in (4, 8):
        update = ps.LockFree(after=1, max_staleness=most)
        cases.append((f"lock-free, max_staleness={most}", update, buffer_bytes + STAGING_BYTES, options.steps))
    for name, update, host_bytes, steps in cases:
        found = run(options.directory, update, host_bytes, rate, steps)
        seconds, stats = found["seconds"], found["stats"]
        moved = mean(each.disk_read_bytes + each.disk_write_bytes for each in stats)
        rows.append(
            [
                name,
                f"{host_bytes / 2**20:.0f}",
                f"{mean(seconds):.2f}",
                f"{mean(seconds) / compute_s:.2f}",
                f"{moved / 2**20:.0f}",
                f"{mean(each.staleness for each in stats):.2f}",
                str(max(each.peak_staleness for each in stats)),
            ]
        )
    publish(
        "lock_free",
        "cpu",
        f"Step of GPT-2 with 89 million parameters ({BATCH} x {SEQUENCE} tokens, bf16, AdamW, clipped), mean of "
        f"{options.steps} steps after "
        f"three (exact: of 3). All optimizer states are on a disk limited to {rate / 1e6:.0f} MB/s for reads and "
        f"writes together: {SLOWER} times slower than the exact step needs to hide them behind the step in memory. "
        f"Limit of a lock-free step: that in memory.",
        ["update", "host memory, MiB", "s per step", "/ in memory", "disk, MiB per step", "staleness", "at most"],
        rows,
    )


if __name__ == "__main__":
    main()
