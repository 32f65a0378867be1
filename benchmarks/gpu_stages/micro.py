"""Rates of the machine and of this package's kernels: copies, updates, page-locking, matrix products, the disk."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from gpu_stages.record import Record
from gpu_stages.timing import once, seconds
from patrickstar._dry_run.machine_profile import benchmark_span
from patrickstar._hardware.cuda_accelerator import CudaAccelerator
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._perf_model.workload import UPDATE_BYTES
from patrickstar._tiers.swap_file import SwapFile

MIB, GIB = 1 << 20, 1 << 30
HOST = torch.device("cpu")


def updates(record: Record, options: SimpleNamespace) -> None:
    """Measure Adam: short against long spans on the host, and on the device."""
    host, device = Kernels.best(HOST), torch.device(options.device)
    total = 1 << (18 if options.small else 26)
    rates = {}
    for numel in (total, total >> 7, total >> 10):
        span = benchmark_span(total)
        pieces = [span.page(slice(first, first + numel)) for first in range(0, total, numel)]

        def run(pieces: list[Span] = pieces) -> None:
            for piece in pieces:
                host.update([piece], ())

        rates[numel] = total / seconds(run, HOST, rounds=5)
        note = f"{rates[numel] / rates[total]:.2f} of that of {total:,}"
        rate = UPDATE_BYTES * rates[numel] / 1e9
        record.figure(f"update on the host, {numel:,} elements a call", rate, "GB/s", note=note)
    target, source = torch.zeros(total), torch.zeros(total)
    copy_s = seconds(lambda: target.copy_(source), HOST, rounds=5)
    record.figure("copy on the host, read and written", 8 * total / copy_s / 1e9, "GB/s")
    numel, kernels = total << (0 if options.small else 2), Kernels.best(device)
    param = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    master, *states = (torch.zeros(numel, device=device) for _ in range(3))
    span = Span(param, Gradient(param), master, tuple(states), benchmark_span(1).rule)
    rate = UPDATE_BYTES * numel / seconds(lambda: kernels.update([span], ()), device, rounds=5) / 1e9
    record.figure(f"update on the device, {numel:,} elements", rate, "GB/s")


def copies(record: Record, options: SimpleNamespace) -> None:
    """Measure copies between page-locked memory and the device, alone and beside an update on the host; products."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    nbytes = MIB if options.small else 64 * MIB
    on_device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if cuda else None for _ in range(2)]

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(on_host[0], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            on_host[1].copy_(on_device[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    def measure(note: str) -> None:
        for name, action, moved in (("H2D", up, 1), ("D2H", down, 1), ("both directions", both, 2)):
            rate = moved * nbytes / seconds(action, device, rounds=5, inner=20) / 1e9
            record.figure(f"copy {name}{note}", rate, "GB/s")

    measure("")
    host, span = Kernels.best(HOST), benchmark_span(1 << (18 if options.small else 26))
    with _repeated(lambda: host.update([span], ())) as times:
        measure(", beside updates on the host")
    rate = UPDATE_BYTES * span.numel * len(times) / sum(times) / 1e9
    record.figure("updates on the host, beside these copies", rate, "GB/s")
    size = 128 if options.small else 8192
    matrix = torch.randn(size, size, device=device).bfloat16()
    product_s = seconds(lambda: torch.mm(matrix, matrix), device, rounds=5, inner=4)
    record.figure(f"matrix product of {size}, bf16", 2 * size**3 / product_s / 1e12, "TFLOP/s")


@contextmanager
def _repeated(action: Callable[[], object]) -> Iterator[list[float]]:
    """Repeat an action in another thread; yield the seconds of each time."""
    times, stop = [], threading.Event()

    def run() -> None:
        while not stop.is_set():
            times.append(once(action, HOST))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


def page_locking(record: Record, options: SimpleNamespace) -> None:
    """Measure page-locking of host memory that was touched before, and that was not."""
    nbytes = 16 * MIB if options.small else 4 * GIB
    for touched in (False, True):
        memory = torch.empty(nbytes, dtype=torch.uint8)
        name = f"{nbytes / GIB:g} GiB, {'touched' if touched else 'not touched'} before"
        if touched:
            record.figure(f"first touch of {name}", once(partial(memory.fill_, 1), HOST), "s")
        if options.device != "cpu":
            _lock_and_unlock(record, name, memory, torch.device(options.device))


def _lock_and_unlock(record: Record, name: str, memory: torch.Tensor, device: torch.device) -> None:
    cuda, locked = CudaAccelerator(device), []
    duration_s = once(lambda: locked.append(cuda.page_lock(memory.data_ptr(), memory.numel())), HOST)
    record.figure(f"page-locking {name}", duration_s, "s")
    if locked[0] is not None:
        record.figure(f"unlocking {name}", once(partial(cuda.page_unlock, locked[0]), HOST), "s")


def disk(record: Record, options: SimpleNamespace) -> None:
    """Measure the swap file in the output directory: writes, reads, and both at once."""
    nbytes = 16 * MIB if options.small else 4 * GIB
    file = SwapFile(Path(options.directory), nbytes)
    record.fact("swap file", f"{file!r}, {'direct' if file.direct else 'buffered'} I/O")
    start, pool = file.reserve(nbytes, "measurement"), WorkerPool(4, "disk")
    offsets = range(start, start + nbytes, PAGE_BYTES)

    def move(transfer: Callable[..., None], offset: int, stage: torch.Tensor) -> None:
        transfer(offset, memoryview(stage.numpy()), PAGE_BYTES, "page")

    def run(*works: tuple[Callable[..., None], range]) -> None:
        transfers = [
            pool.submit([partial(move, transfer, offset) for offset in part], "pages") for transfer, part in works
        ]
        for transfer in transfers:
            transfer.wait()

    half = len(offsets) // 2
    for name, works in {
        "written": [(file.write, offsets)],
        "read": [(file.read, offsets)],
        "written and read at once": [(file.write, offsets[:half]), (file.read, offsets[half:])],
    }.items():
        duration_s = once(lambda works=works: run(*works), HOST)
        record.figure(f"{nbytes / GIB:g} GiB {name}, 4 threads", nbytes / duration_s / 1e9, "GB/s")
    pool.close()
    file.close()
