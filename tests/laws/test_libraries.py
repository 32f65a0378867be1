"""Law 2 with device memory used by libraries: it is counted before training and during training."""

import re
from functools import partial

import pytest
import torch
from probes import after_allocations
from toys import inputs, layers, mean_square, train

import patrickstar as ps
from patrickstar._dry_run.simulation import forward_backward_step, simulate
from patrickstar._engine.engine import Engine
from patrickstar._memory.hardware import Hardware
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar.errors import BudgetError
from patrickstar.testing import NoMeter

WIDTH = 64
LIBRARY_BYTES = 1 << 20


class Libraries(NoMeter):
    """Meter that reports only the memory of libraries."""

    def now(self, chunk_bytes: int) -> int:
        return LIBRARY_BYTES

    def peak(self, chunk_bytes: int) -> int:
        return LIBRARY_BYTES


class WithLibraries(Hardware):
    """CPU hardware that reports library workspaces on its device tier."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        return LIBRARY_BYTES


build = partial(layers, WIDTH, 6)


def engine(**options) -> Engine:
    config = ps.Config(device="cpu", chunk_size=2 * WIDTH * (WIDTH + 1), **options)
    return Engine(build, config, hardware=WithLibraries(), meter=Libraries(), poison=True)


def train_watched(made: Engine) -> None:
    used = []
    after_allocations(made, lambda chunk: used.append(made.inspect().device.chunk_bytes))
    train(made, inputs(3, WIDTH, rows=4))
    assert made.stats.last.device_peak_non_model_bytes == LIBRARY_BYTES
    assert max([0, *used]) + LIBRARY_BYTES <= made.device_budget_bytes


def test_a_budget_that_holds_the_model_but_not_the_libraries_is_refused():
    """The error before training names the libraries and the smallest budgets that work, and these work."""
    with pytest.raises(BudgetError) as refused:
        engine(device_memory=LIBRARY_BYTES, host_memory=1 << 30)
    text = str(refused.value)
    assert f"this device needs {LIBRARY_BYTES} bytes (1.00 MiB) more for its libraries (cuBLAS workspaces)" in text
    assert f"a device budget of {LIBRARY_BYTES} bytes" in text
    (least,) = re.findall(r"device_memory=(\d+) bytes .*with this host_memory", text)
    assert int(least) > LIBRARY_BYTES and refused.value.short_bytes == int(least) - LIBRARY_BYTES
    with pytest.raises(BudgetError):
        engine(device_memory=int(least) - 1, host_memory=1 << 30)
    made = engine(device_memory=int(least), host_memory=1 << 30)
    train_watched(made)
    made.close()


def test_the_pair_of_budgets_in_the_error_works():
    with pytest.raises(BudgetError) as refused:
        engine(device_memory=LIBRARY_BYTES + 100, host_memory=1000)
    ((device, host),) = re.findall(r"device_memory=(\d+) with host_memory=(\d+) bytes", str(refused.value))
    made = engine(device_memory=int(device), host_memory=int(host))
    train_watched(made)
    made.close()


def test_libraries_are_counted_with_a_disk(tmp_path):
    with pytest.raises(BudgetError) as refused:
        engine(device_memory=LIBRARY_BYTES, host_memory="64KiB", disk=tmp_path)
    text = str(refused.value)
    (device,) = re.findall(r"device_memory=(\d+) bytes", text.partition("Required")[2])
    (host,) = re.findall(r"host_memory=(\d+) bytes", text.partition("Required")[2])
    made = engine(device_memory=int(device), host_memory=int(host), disk=tmp_path)
    train_watched(made)
    made.close()


def test_the_chunk_size_fits_the_memory_left_by_libraries():
    config = ps.Config(device="cpu", device_memory=LIBRARY_BYTES + 40_000, host_memory="1GiB")
    made = Engine(build, config, hardware=WithLibraries(), meter=Libraries())
    assert max(chunk.compute_bytes for chunk in made.layout.chunks) <= 40_000 // 4
    made.close()


def test_a_meter_that_reports_nothing_reports_no_libraries():
    config = ps.Config(device="cpu", chunk_size=2 * WIDTH * (WIDTH + 1), device_memory="64KiB", host_memory="1GiB")
    Engine(build, config, hardware=WithLibraries(), meter=NoMeter()).close()


def test_a_dry_run_counts_libraries():
    machine = Machine(
        name="a test's",
        source="a test",
        gpu=Gpu(count=1, memory=LIBRARY_BYTES + (1 << 18), matmul_tflops=1.0, memory_bandwidth=1e9),
        host=Host(memory=1 << 30, memory_bandwidth=1e9, cores=1),
        links=Links(h2d=1e9, d2h=1e9),
    )
    config = ps.Config(device="cpu", chunk_size=2 * WIDTH * (WIDTH + 1))
    step = forward_backward_step(mean_square, (torch.zeros(4, WIDTH),), {})
    reports = [simulate(Engine, build, config, step, machine, library_bytes=n) for n in (0, LIBRARY_BYTES)]
    peaks = [report.stats.device_peak_non_model_bytes for report in reports]
    assert abs(peaks[1] - peaks[0] - LIBRARY_BYTES) < 4096, "only transfers in flight may differ otherwise"
    with pytest.raises(BudgetError, match=r"for its libraries"):
        small = machine.model_copy(update={"gpu": machine.gpu.model_copy(update={"memory": LIBRARY_BYTES})})
        simulate(Engine, build, config, step, small, library_bytes=LIBRARY_BYTES)
