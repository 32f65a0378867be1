"""Measure checkpoints: rates against the disk, extra memory, and the slowdown of a training step during a save.

python benchmarks/checkpoints.py [--directory .] [--model gpt2-124m] [--rounds 7] [--batch 8] [--sequence 256]
A save alternates with a bare loop that writes the same number of bytes; both create a new file, reserve its space,
write it in pages with direct I/O, and synchronize it. Steps during a save alternate with steps without; the call that
requests the checkpoint is part of its step. Ratios are medians over pairs; memory is the rise of the peak resident
memory.
"""

import argparse
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from disk import file_system
from report import publish
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar._checkpoint.direct_writer import PAGES
from patrickstar._layout.byte_size import format_size
from patrickstar._memory.direct_io import PAGE_BYTES
from patrickstar._models.presets import PRESETS

BARE_THREADS = 2


def bare_write(path: Path, nbytes: int) -> None:
    """Write a new file of `nbytes` with as few calls as possible."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)

    def loop(first: int) -> None:
        page = mmap.mmap(-1, PAGE_BYTES)
        page.write(os.urandom(PAGE_BYTES))
        for offset in range(first * PAGE_BYTES, nbytes, BARE_THREADS * PAGE_BYTES):
            os.pwrite(fd, page, offset)

    in_threads([lambda first=first: loop(first) for first in range(BARE_THREADS)])  # type: ignore[misc]
    os.ftruncate(fd, nbytes)
    os.fsync(fd)
    os.close(fd)


def in_threads(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not report the memory of a process")


def extra_bytes(action: Callable[[], object]) -> int:
    """Return the peak growth of resident memory while `action` runs."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    action()
    return resident("VmHWM") - before


def shown(nbytes: int) -> str:
    return format_size(max(0, nbytes))


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    options = parser.parse_args()
    config = PRESETS[options.model].config()
    config.use_cache = False
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(lambda: GPT2LMHeadModel(config).train(), ps.Config(device="cpu"))
    ids = torch.randint(0, config.vocab_size, (options.batch, options.sequence))
    folder = options.directory / "checkpoints-benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def step() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    def remove() -> None:
        shutil.rmtree(folder / "one", ignore_errors=True)
        (folder / "bare").unlink(missing_ok=True)
        os.sync()

    for _ in range(3):
        step()
    chunk_bytes = max(chunk.compute_bytes for chunk in engine.layout.chunks)
    pages_bytes = min(2 * chunk_bytes, PAGES * PAGE_BYTES)
    engine.save(folder / "one")
    nbytes = sum(file.stat().st_size for file in (folder / "one").iterdir())
    rates: list[tuple[float, float]] = []
    loads: list[float] = []
    for number in range(options.rounds):
        pair = {}
        for side in ("ours", "bare")[:: 1 if number % 2 else -1]:
            remove()
            pair[side] = timed(
                (lambda: engine.save(folder / "one")) if side == "ours" else lambda: bare_write(folder / "bare", nbytes)
            )
            if side == "ours":
                loads.append(timed(lambda: engine.load(folder / "one")))
        rates.append((pair["ours"], pair["bare"]))
    remove()
    waiting_bytes = extra_bytes(lambda: engine.save(folder / "one"))
    remove()
    step()

    def step_during_save() -> None:
        engine.save(folder / "one", wait=False)
        step()

    def step_during_dd() -> None:
        """Train while another program writes as many bytes: the cost on this machine without shared memory."""
        pages = f"count={nbytes // PAGE_BYTES}"
        other = [
            "dd",
            "if=/dev/zero",
            f"of={folder / 'bare'}",
            f"bs={PAGE_BYTES}",
            pages,
            "oflag=direct",
            "status=none",
        ]
        with subprocess.Popen(other):
            step()

    steps: list[dict[str, float]] = []
    left: list[float] = []
    actions = {"beside": step_during_save, "alone": step, "other": step_during_dd}
    for number in range(options.rounds):
        times = {}
        for side in (*actions, *actions)[number % 3 : number % 3 + 3]:
            remove()
            times[side] = timed(actions[side])
            waited = timed(engine.finish_saving)
            if side == "beside":
                left.append(waited)
        steps.append(times)
    alone_bytes = extra_bytes(step)
    remove()
    beside_bytes = extra_bytes(lambda: (step_during_save(), engine.finish_saving())) - alone_bytes
    shutil.rmtree(folder)
    written = nbytes / median(ours for ours, _ in rates) / 1e9
    bare = nbytes / median(other for _, other in rates) / 1e9
    share = median(other / ours for ours, other in rates)
    cost, others_cost = (median(times[side] / times["alone"] for times in steps) for side in ("beside", "other"))
    beside_s, alone_s = (median(times[side] for times in steps) for side in ("beside", "alone"))
    rows = [
        ["checkpoint size", f"{format_size(nbytes)}, {nbytes / engine.layout.numel:.2f} per parameter", "12"],
        ["save rate", f"{written:.2f} GB/s", f"{bare:.2f} GB/s, bare write loop"],
        ["save rate / bare write loop", f"{share:.2f}", ">= 0.8"],
        ["extra memory, blocking save", shown(waiting_bytes), f"{shown(2 * chunk_bytes)}, two chunks"],
        ["extra memory, background save", shown(beside_bytes), f"{shown(pages_bytes)}, nine pages"],
        ["step during a save", f"{beside_s:.2f} s", f"{alone_s:.2f} s without"],
        [
            "step during a save / step without",
            f"{cost:.3f}",
            f"<= 1.15; {others_cost:.3f} while another program writes as much",
        ],
        ["remaining save time after that step", f"{median(left):.2f} s", ""],
        ["load rate, checksums verified first", f"{nbytes / median(loads) / 1e9:.2f} GB/s", "reads twice"],
    ]
    publish(
        "checkpoints",
        "cpu",
        f"Checkpoints of {options.model} ({engine.layout.numel / 1e6:.0f}M parameters) on "
        f"{file_system(options.directory)}, batch {options.batch} of {options.sequence} tokens, medians of "
        f"{options.rounds} pairs",
        ["metric", "measured", "limit"],
        rows,
    )


if __name__ == "__main__":
    main()
