"""Measure checkpoints: rates against the disk, extra memory, and the slowdown of a training step during a save.

python benchmarks/checkpoints.py [--directory .] [--model gpt2-124m] [--rounds 7] [--batch 8] [--sequence 256]
A save alternates with a bare loop that writes the same number of bytes; both create a new file, reserve its space,
write it in pages with direct I/O, and synchronize it. Steps during a save alternate with steps without; the call that
requests the checkpoint is part of its step. Ratios are medians over pairs; memory is the rise of the peak resident
memory.
"""

import argparse
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from statistics import median

import torch
from disk import file_system, noise
from fresh_processes import growth
from report import options, publish
from steps import gpt, in_threads, ratio_of, seconds_of, tokens, train_step

import patrickstar as ps
from patrickstar._checkpoint.direct_writer import PAGES
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._layout.byte_size import format_size

BARE_THREADS = 2


def bare_write(path: Path, nbytes: int) -> None:
    """Write a new file of `nbytes` with as few calls as possible."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)

    def loop(first: int) -> None:
        page = noise()
        for offset in range(first * PAGE_BYTES, nbytes, BARE_THREADS * PAGE_BYTES):
            os.pwrite(fd, page, offset)

    in_threads(partial(loop, first) for first in range(BARE_THREADS))
    os.ftruncate(fd, nbytes)
    os.fsync(fd)
    os.close(fd)


def shown(nbytes: int) -> str:
    return format_size(max(0, nbytes))


class Work:
    """An engine, its step, and what writes a checkpoint or as many bytes."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.engine, _ = ps.initialize(partial(gpt, given.model), ps.Config(device="cpu"))
        self.ids = tokens(given.model, given.batch, given.sequence)
        self.folder = given.directory / "checkpoints-benchmark"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.saved, self.other = self.folder / "one", self.folder / "bare"
        for _ in range(3):
            self.step()
        self.save()
        self.nbytes = sum(file.stat().st_size for file in self.saved.iterdir())

    def step(self) -> None:
        train_step(self.engine, self.ids)

    def save(self, wait: bool = True) -> None:
        self.engine.save(self.saved, wait=wait)

    def load(self) -> None:
        self.engine.load(self.saved)

    def write_bare(self) -> None:
        bare_write(self.other, self.nbytes)

    def step_during_save(self) -> None:
        self.save(wait=False)
        self.step()

    def step_during_dd(self) -> None:
        """Train while another program writes as many bytes: the cost on this machine without shared memory."""
        sizes = [f"bs={PAGE_BYTES}", f"count={self.nbytes // PAGE_BYTES}"]
        command = ["dd", "if=/dev/zero", f"of={self.other}", *sizes, "oflag=direct", "status=none"]
        with subprocess.Popen(command):
            self.step()

    def remove(self) -> None:
        shutil.rmtree(self.saved, ignore_errors=True)
        self.other.unlink(missing_ok=True)
        os.sync()


def main() -> None:
    given = options(__doc__, directory=Path("."), model="gpt2-124m", rounds=7, batch=8, sequence=256)
    work = Work(given)
    engine, nbytes = work.engine, work.nbytes
    chunk_bytes = max(chunk.compute_bytes for chunk in engine.layout.chunks)
    pages_bytes = min(2 * chunk_bytes, PAGES * PAGE_BYTES)
    writes: dict[str, list[float]] = {"save": [], "write_bare": [], "load": []}
    for number in range(given.rounds):
        for side in ("save", "write_bare")[:: 1 if number % 2 else -1]:
            work.remove()
            writes[side].append(seconds_of(getattr(work, side)))
            if side == "save":
                writes["load"].append(seconds_of(work.load))
    work.remove()
    _, waiting_bytes = growth(work.save)
    work.remove()
    work.step()
    names = ("step_during_save", "step", "step_during_dd")
    steps: dict[str, list[float]] = {name: [] for name in names}
    left: list[float] = []
    for number in range(given.rounds):
        for side in (*names, *names)[number % 3 : number % 3 + 3]:
            work.remove()
            steps[side].append(seconds_of(getattr(work, side)))
            waited = seconds_of(engine.finish_saving)
            if side == "step_during_save":
                left.append(waited)
    _, alone_bytes = growth(work.step)
    work.remove()
    _, beside_bytes = growth(lambda: (work.step_during_save(), engine.finish_saving()))
    shutil.rmtree(work.folder)
    rate = {side: f"{nbytes / median(values) / 1e9:.2f} GB/s" for side, values in writes.items()}
    step_s = {side: f"{median(values):.2f} s" for side, values in steps.items()}
    cost, others_cost = (ratio_of(steps[side], steps["step"]) for side in ("step_during_save", "step_during_dd"))
    rows = [
        ("checkpoint size", f"{format_size(nbytes)}, {nbytes / engine.layout.numel:.2f} per parameter", "12"),
        ("save rate", rate["save"], f"{rate['write_bare']}, bare write loop"),
        ("save rate / bare write loop", f"{ratio_of(writes['write_bare'], writes['save']):.2f}", ">= 0.8"),
        ("extra memory, blocking save", shown(waiting_bytes), f"{shown(2 * chunk_bytes)}, two chunks"),
        ("extra memory, background save", shown(beside_bytes - alone_bytes), f"{shown(pages_bytes)}, nine pages"),
        ("step during a save", step_s["step_during_save"], f"{step_s['step']} without"),
        (
            "step during a save / step without",
            f"{cost:.3f}",
            f"<= 1.15; {others_cost:.3f} while another program writes as much",
        ),
        ("remaining save time after that step", f"{median(left):.2f} s", ""),
        ("load rate, checksums verified first", rate["load"], "reads twice"),
    ]
    publish(
        "checkpoints",
        f"Checkpoints of {given.model} ({engine.layout.numel / 1e6:.0f}M parameters) on "
        f"{file_system(given.directory)}, batch {given.batch} of {given.sequence} tokens, medians of {given.rounds} "
        f"pairs",
        rows,
        ["metric", "measured", "limit"],
    )


if __name__ == "__main__":
    main()
