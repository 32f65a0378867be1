"""Checkpoints against the disk's write rate and reading rate, the memory they take, and what one costs a training step.

python benchmarks/checkpoints.py [--directory .] [--model gpt2-124m] [--rounds 7] [--batch 8] [--sequence 256]
Saving and a bare loop that writes as many bytes take turns; both make a new file, reserve it, write it in pages past
the page cache, and synchronise it. Steps with a checkpoint beside them and steps without take turns too; asking for the
checkpoint counts as a part of its step. Ratios are medians over pairs; memory is the process's peak of resident bytes
beyond what it had.
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
from patrickstar._cli.presets import PRESETS
from patrickstar._layout.byte_size import format_size
from patrickstar._memory.swap_file import PAGE_BYTES

BARE_THREADS = 2


def bare_write(path: Path, nbytes: int) -> None:
    """A new file of so many bytes, by as few calls as there can be."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)

    def loop(first: int) -> None:
        page = mmap.mmap(-1, PAGE_BYTES)
        page.write(os.urandom(PAGE_BYTES))
        for at in range(first * PAGE_BYTES, nbytes, BARE_THREADS * PAGE_BYTES):
            os.pwrite(fd, page, at)

    in_threads([lambda first=first: loop(first) for first in range(BARE_THREADS)])  # type: ignore[misc]
    os.ftruncate(fd, nbytes)
    os.fsync(fd)
    os.close(fd)


def in_threads(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell a process's memory")


def extra_bytes(act: Callable[[], object]) -> int:
    """By how much resident memory grows at most while `act` runs."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    act()
    return resident("VmHWM") - before


def shown(nbytes: int) -> str:
    return format_size(max(0, nbytes))


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
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

    def save_beside() -> None:
        engine.save(folder / "one", wait=False)
        step()

    def write_beside() -> None:
        """A program that writes as much, and shares no memory with training: what the machine asks for it."""
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
    acts = {"beside": save_beside, "alone": step, "other": write_beside}
    for number in range(options.rounds):
        times = {}
        for side in (*acts, *acts)[number % 3 : number % 3 + 3]:
            remove()
            times[side] = timed(acts[side])
            waited = timed(engine.finish_saving)
            if side == "beside":
                left.append(waited)
        steps.append(times)
    alone_bytes = extra_bytes(step)
    remove()
    beside_bytes = extra_bytes(lambda: (save_beside(), engine.finish_saving())) - alone_bytes
    shutil.rmtree(folder)
    written = nbytes / median(ours for ours, _ in rates) / 1e9
    bare = nbytes / median(other for _, other in rates) / 1e9
    share = median(other / ours for ours, other in rates)
    cost, others_cost = (median(times[side] / times["alone"] for times in steps) for side in ("beside", "other"))
    beside_s, alone_s = (median(times[side] for times in steps) for side in ("beside", "alone"))
    rows = [
        ["bytes of a checkpoint", f"{format_size(nbytes)}, {nbytes / engine.layout.numel:.2f} per parameter", "12"],
        ["saving", f"{written:.2f} GB/s", f"{bare:.2f} GB/s, a bare loop"],
        ["saving, of a bare loop's rate", f"{share:.2f}", ">= 0.8"],
        ["memory beyond, while training waits", shown(waiting_bytes), f"{shown(2 * chunk_bytes)}, two chunks"],
        ["memory beyond, beside training", shown(beside_bytes), f"{shown(pages_bytes)}, nine pages"],
        ["a step beside which one is written", f"{beside_s:.2f} s", f"{alone_s:.2f} s without"],
        [
            "step beside a save, of one without",
            f"{cost:.3f}",
            f"<= 1.15; another program's writing costs {others_cost:.3f}",
        ],
        ["what is left to write after that step", f"{median(left):.2f} s", ""],
        ["loading, checksums first", f"{nbytes / median(loads) / 1e9:.2f} GB/s", "reading twice"],
    ]
    publish(
        "checkpoints",
        "cpu",
        f"Checkpoints of {options.model} ({engine.layout.numel / 1e6:.0f}M parameters) on "
        f"{file_system(options.directory)}, batch {options.batch} of {options.sequence} tokens, medians of "
        f"{options.rounds} pairs",
        ["what", "measured", "limit"],
        rows,
    )


if __name__ == "__main__":
    main()
