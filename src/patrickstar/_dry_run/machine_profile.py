"""Machine spec of the local machine: memory sizes, and rates measured by short benchmarks."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from patrickstar._dry_run.device_timer import DeviceTimer
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.machine_name import usable_cores
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.vm_pool import PagePool, can_move_pages, round_up
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._layout.schema import EXP_AVG, PARAM16
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine
from patrickstar._perf_model.workload import UPDATE_BYTES
from patrickstar._step.streamed_update import StreamedUpdates, buffer_bytes
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.device_tier import DeviceTier
from patrickstar._tiers.disk_tier import DiskTier
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import ALIGN_BYTES, HostArena
from patrickstar._tiers.host_tier import HostTier
from patrickstar._tiers.page_codec import PageCodec
from patrickstar._tiers.swap_file import SwapFile

ROUNDS = 5
"""Number of measurements: a result is their median, or their mean if no pauses are between them."""
CHUNK_BYTES = 1 << 26
DISK_CHUNK_BYTES = 16 * PAGE_BYTES
COPIED_BYTES = 1 << 29
UPDATED_NUMEL = 64_000_000
"""Bytes copied and parameters updated: larger than any cache."""
SMALLEST_MATRIX, LARGEST_MATRIX = 256, 8192
"""Sides of the square matrices in the matmul benchmark, doubled until a product takes `MIN_PRODUCT_S`."""
MIN_PRODUCT_S = 0.005
"""Many times the overhead of launch and synchronization. CPUs without bf16 need seconds for large products."""


def profile_machine(device: torch.device, directory: str | Path | None = None) -> Machine:
    """Measure this machine; takes about three seconds, and one more for the disk of `directory`.

    Raises:
        DiskError: `directory` cannot be used.
    """
    hardware = Hardware(device)
    hardware.start()
    disk = measure_disk(directory) if directory is not None else None
    h2d, d2h = _copy_rates(hardware)
    gpu = None
    if hardware.accelerator is not None:
        tflops, half_rate_size = rate_curve(_products(hardware, torch.bfloat16))
        size, fp32_tflops = max(_products(hardware, torch.float32).items())
        gpu = Gpu(
            count=1,
            memory=hardware.device_bytes(),
            matmul_tflops=tflops,
            fp32_tflops=fp32_tflops * (size + half_rate_size) / size,
            memory_bandwidth=_copy_bandwidth(hardware),
            half_rate_size=half_rate_size,
        )
    cpu = Hardware(torch.device("cpu"))
    return Machine(
        name="here",
        source="measured by a short probe",
        gpu=gpu,
        host=Host(
            memory=hardware.host_bytes(),
            memory_bandwidth=_copy_bandwidth(cpu),
            update_rate=_update_rate(hardware),
            cores=usable_cores(),
            matmul_tflops=max(_products(cpu, torch.bfloat16).items())[1],
            fp32_tflops=max(_products(cpu, torch.float32).items())[1],
            page_lock=_page_lock_rate(hardware),
        ),
        links=Links(h2d=h2d, d2h=d2h),
        disk=disk,
        budgets=True,
        measured=True,
    )


def measure_disk(
    directory: str | Path, chunk_bytes: int = DISK_CHUNK_BYTES, codec: PageCodec | None = None
) -> DiskDrive:
    """Time reading and writing a few chunks at the same time, as steps do, over the code path of chunk transfers.

    It takes about a second. A drive with a cache of fast cells writes as fast only until that is full.

    Args:
        codec: Codec of packed pages; default: they are stored as they are.

    Returns:
        The free space, and the rates of unpacked bytes with checksums.

    Raises:
        DiskError: The directory cannot be used.
    """
    device = torch.device("cpu")
    pages = PagePool() if can_move_pages() else None
    tier = DiskTier(SwapFile(directory, 2 * chunk_bytes * ROUNDS), codec=codec)
    chunks = [Chunk(EXP_AVG, i, chunk_bytes // 4, "float32", device) for i in range(2 * ROUNDS)]
    buffers = [Chunk(EXP_AVG, len(chunks) + i, chunk_bytes // 4, "float32", device, pages) for i in range(2)]
    for buffer in buffers:
        buffer.allocate_device()
    source, target = (buffer.on_device(buffer.whole).normal_().view(torch.uint8) for buffer in buffers)
    try:
        for chunk in chunks:
            tier.reserve(chunk)
        for chunk in chunks[:ROUNDS]:
            tier.write(chunk, 0, source).wait()
        reads = [tier.read(chunk, 0, target) for chunk in chunks[:ROUNDS]]
        writes = [tier.write(chunk, 0, source) for chunk in chunks[ROUNDS:]]
        read_s, write_s = _span_s(reads), _span_s(writes)
    finally:
        tier.close()
        for buffer in buffers:
            buffer.memory.close()
    free_bytes = Hardware(device).free_disk_bytes(Path(directory))
    return DiskDrive(capacity=free_bytes, read=ROUNDS * chunk_bytes / read_s, write=ROUNDS * chunk_bytes / write_s)


def _span_s(transfers: Sequence[Transfer]) -> float:
    """Wait for transfers, and return the seconds from the begin of the first one to the end of the last one."""
    for transfer in transfers:
        transfer.wait()
    intervals = [interval for transfer in transfers if (interval := transfer.interval(None)) is not None]
    assert len(intervals) == len(transfers), "transfers of worker threads are timed"
    return max(end for _, end in intervals) - min(begin for begin, _ in intervals)


def elapsed_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `action` takes, including its work on the device."""
    start = time.perf_counter()
    action()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _median_s(action: Callable[[], object], hardware: Hardware) -> float:
    """Return the median time of several runs after one warm-up run; on an accelerator that of the device alone."""
    if hardware.accelerator is None:
        return median([elapsed_s(action, hardware.device) for _ in range(ROUNDS + 1)][1:])
    action()
    timer = DeviceTimer(hardware.accelerator)
    return median([timer.measure([action], 1)[0] for _ in range(ROUNDS)])


def _products(hardware: Hardware, dtype: torch.dtype) -> dict[int, float]:
    """Return the TFLOPS of products of square matrices by their size."""
    tflops, size = {}, SMALLEST_MATRIX
    while True:
        a, b = (torch.randn(size, size, device=hardware.device).to(dtype) for _ in range(2))
        seconds = _median_s(partial(torch.mm, a, b), hardware)
        tflops[size] = 2 * size**3 / seconds / 1e12
        if seconds >= MIN_PRODUCT_S or size >= LARGEST_MATRIX:
            return tflops
        size *= 2


def rate_curve(tflops: dict[int, float]) -> tuple[float, int]:
    """Return the rate of large products, and the size that reaches half of it, as `Gpu.matmul_rate` combines them.

    The curve has the rates of the largest size and of a quarter of it. If the smaller one is no slower, or so slow that
    no such curve has both, all sizes have the rate of the largest.
    """
    size, large = max(tflops.items())
    slope = (1 / tflops.get(size // 4, large) - 1 / large) / (4 / size - 1 / size)
    limit = 1 / large - slope / size
    return (1 / limit, round(slope / limit)) if slope > 0 and limit > 0 else (large, 0)


def _copy_bandwidth(hardware: Hardware) -> float:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=hardware.device)
    target = torch.zeros_like(source)
    return 2 * COPIED_BYTES / _median_s(lambda: target.copy_(source), hardware)


def benchmark_span(numel: int, device: torch.device | None = None) -> Span:
    """Return a span of `numel` parameters on the host for a mixed-precision Adam update.

    Args:
        numel: Number of parameters.
        device: Where the parameters and their gradients are. Default: on the host, too.
    """
    param = torch.zeros(numel, dtype=torch.bfloat16, device="cpu" if device is None else device)
    master, exp_avg, exp_avg_sq = (torch.zeros(numel, device="cpu") for _ in range(3))
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=1)
    return Span(param, Gradient(param), master, (exp_avg, exp_avg_sq), rule)


def _update_rate(hardware: Hardware, numel: int = UPDATED_NUMEL) -> float:
    """Return the bytes per second of an update on the host, beside an accelerator with its copies in both directions.

    The latter is the engine's own path: the kernel gets the pieces that it gets in a step, without a pause between two
    updates.
    """
    kernels = Kernels.best(hardware.device)
    if hardware.accelerator is None:
        span = benchmark_span(numel)
        return UPDATE_BYTES * numel / _median_s(lambda: kernels.update([span], ()), hardware)
    span = benchmark_span(numel, hardware.device)
    nbytes = round_up(buffer_bytes(numel, span.param.itemsize, by_pages=True), ALIGN_BYTES)
    host = HostTier(nbytes, nbytes, hardware.host_arena, poison=False)
    updates = StreamedUpdates(kernels, hardware.accelerator, host, nbytes)
    try:

        def run(count: int) -> None:
            for running in [updates.submit([span], (), ()) for _ in range(count)]:
                running.wait()

        run(1)
        update_s = elapsed_s(partial(run, ROUNDS), hardware.device) / ROUNDS
    finally:
        updates.close()
        host.unlock()
    return UPDATE_BYTES * numel / update_s


def _page_lock_rate(hardware: Hardware) -> float | None:
    """Return the bytes of new host memory that are page-locked per second, as an engine does; None if none are."""
    arenas: list[HostArena] = []
    lock_s = elapsed_s(lambda: arenas.append(hardware.host_arena(COPIED_BYTES)), hardware.device)
    locked = arenas[0].page_locked
    arenas[0].unlock()
    return COPIED_BYTES / lock_s if locked else None


def _copy_rates(hardware: Hardware) -> tuple[float, float]:
    """Return H2D and D2H bytes per second, measured over the code path that chunk transfers use."""
    device_tier = DeviceTier(hardware, CHUNK_BYTES, poison=False)
    host, copies = HostTier(CHUNK_BYTES, CHUNK_BYTES, hardware.host_arena, poison=False), hardware.copies()
    chunk = device_tier.new(PARAM16, 0, CHUNK_BYTES // 2, "bfloat16")
    host.allocate(chunk).zero_()

    def fetch() -> None:
        device_tier.allocate(chunk)
        copies.up_now(chunk)

    h2d_times, d2h_times = [], []
    for _ in range(ROUNDS + 1):
        h2d_times.append(elapsed_s(fetch, hardware.device))
        d2h_times.append(elapsed_s(lambda: copies.down_now(chunk), hardware.device))
        device_tier.free(chunk)
    host.free(chunk)
    chunk.memory.close()
    copies.close()
    host.unlock()
    return CHUNK_BYTES / median(h2d_times[1:]), CHUNK_BYTES / median(d2h_times[1:])
