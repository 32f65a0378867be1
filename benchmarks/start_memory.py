"""Measure the memory of all processes while they create an engine, from random values and from a folder.

python benchmarks/start_memory.py [--model llama-3.2-1b] [--processes 1 2 4] [--host-memory 24GB]

The memory of a process is its proportional set size, without that after its imports; sums over all processes are
sampled every 20 ms. Limit: 14 bytes per parameter, and the largest parameter in fp32 in each process.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from fresh_processes import rendezvous
from load_model import write_folder
from report import filled, options, publish
from transformers import AutoModelForCausalLM

import patrickstar as ps
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar._models.model_source import find_model
from patrickstar.integrations.transformers import from_pretrained

SAMPLE_S = 0.02


def memory_bytes(pid: int) -> int:
    """Return a process's proportional set size; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0


def start(given: argparse.Namespace, size: int, folder: str | None, mark: str, rank: int) -> dict[str, Any]:
    """Create an engine in one process, after the parent has seen its memory."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    ps.join()
    torch.manual_seed(0)
    Path(mark, f"{rank}-{os.getpid()}").touch()
    while not Path(mark, "go").exists():
        time.sleep(SAMPLE_S)
    began = time.monotonic()
    budget = parse_size(given.host_memory) // 4 // size
    config = ps.Config(device="cpu", precision="bf16", device_memory=budget, host_memory=3 * budget * size)
    if folder is None:
        engine, _ = ps.initialize(partial(AutoModelForCausalLM.from_config, find_model(given.model).config), config)
    else:
        engine, _ = from_pretrained(folder, config)
    seconds = time.monotonic() - began
    shapes = [managed.numel() for managed in engine.parameters()]
    held = engine.inspect()
    chunk_bytes = held.device.chunk_bytes + held.host.chunk_bytes
    engine.average(0.0)  # until all have finished
    engine.close(keep=False)
    return {"seconds": seconds, "numel": sum(shapes), "largest": max(shapes), "chunks": chunk_bytes}


def measured(given: argparse.Namespace, size: int, folder: str | None) -> dict[str, str]:
    """Return the row of one run."""
    rendezvous(size, threads=1)
    with tempfile.TemporaryDirectory() as mark, ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(start, given, size, folder, mark, rank) for rank in range(size)]
        while len(names := os.listdir(mark)) < size:
            time.sleep(SAMPLE_S)
        pids = [int(name.partition("-")[2]) for name in names]
        before = sum(map(memory_bytes, pids))
        Path(mark, "go").touch()
        peak = 0
        while not all(future.done() for future in futures):
            peak = max(peak, sum(map(memory_bytes, pids)) - before)
            time.sleep(SAMPLE_S)
        rows = [future.result() for future in futures]
    data_bytes = 14 * rows[0]["numel"]
    limit = data_bytes + size * 4 * rows[0]["largest"]
    return {
        "values": "random" if folder is None else "folder",
        "p": str(size),
        "14 M": format_size(data_bytes),
        "chunks, all processes": format_size(sum(row["chunks"] for row in rows)),
        "peak, all processes": format_size(peak),
        "peak / limit": f"{peak / limit:.3f}",
        "seconds": f"{max(row['seconds'] for row in rows):.1f}",
    }


def main() -> None:
    given = options(__doc__, model="llama-3.2-1b", processes=[1, 2, 4], host_memory="24GB")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), given.model)
        for source in (None, folder):
            for size in given.processes:
                rows.append(measured(given, size, source))
                print(list(rows[-1].values()), flush=True)
    publish("start_memory", filled("start_memory", model=given.model, budget=given.host_memory), rows)


if __name__ == "__main__":
    main()
