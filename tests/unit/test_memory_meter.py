"""Meters of non-model data, on real memory."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from patrickstar._memory import memory_meter as meter
from patrickstar._memory.memory_meter import ResidentMeter, SampledMeter, default_meter, installed_bytes

MIB = 1024**2
SIZE = 64 * MIB
TOLERANCE = 4 * MIB
"""What the interpreter and the C library may come to use or give back beside the tensor."""

CPU = torch.device("cpu")

resident = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this kernel keeps no resettable peak of resident memory"
)


def taken() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8)


def ready(found):
    gc.collect()
    found.reclaim()
    found.calibrate(0)
    found.restart()
    return found


@pytest.fixture(params=[pytest.param(ResidentMeter, marks=resident), SampledMeter])
def calibrated(request):
    return ready(request.param())


def test_a_tensor_is_seen_to_come_and_go(calibrated):
    assert calibrated.now(0) < TOLERANCE
    tensor = taken()
    assert abs(calibrated.now(0) - SIZE) < TOLERANCE
    assert calibrated.peak(0) >= SIZE - TOLERANCE
    del tensor
    calibrated.reclaim()
    assert calibrated.now(0) < TOLERANCE


def test_chunks_are_not_counted(calibrated):
    chunk = taken()
    activation = taken()
    assert abs(calibrated.now(chunk.nbytes) - SIZE) < TOLERANCE
    assert abs(calibrated.peak(chunk.nbytes) - SIZE) < TOLERANCE
    del activation
    assert calibrated.now(chunk.nbytes) < TOLERANCE
    assert calibrated.now(4 * SIZE) == 0, "non-model data is never less than none"


def test_calibration_takes_what_there_is_as_nobodys(calibrated):
    before, chunk = taken(), taken()
    calibrated.calibrate(chunk.nbytes)
    calibrated.restart()
    assert calibrated.now(chunk.nbytes) < TOLERANCE
    assert calibrated.peak(chunk.nbytes) < TOLERANCE
    after = taken()
    assert abs(calibrated.now(chunk.nbytes) - after.nbytes) < TOLERANCE
    del before, after
    assert calibrated.now(chunk.nbytes) == 0


@resident
def test_a_peak_inside_an_interval_is_seen_and_forgotten_on_restart():
    found = ready(ResidentMeter())
    tensor = taken()
    del tensor
    assert found.now(0) < TOLERANCE
    assert abs(found.peak(0) - SIZE) < TOLERANCE
    assert abs(found.peak(0) - SIZE) < TOLERANCE, "reading a peak does not forget it"
    found.restart()
    assert found.peak(0) < TOLERANCE


@resident
def test_a_restart_forgets_the_past_and_not_what_is_there():
    found = ready(ResidentMeter())
    kept, passing = taken(), taken()
    del passing
    assert abs(found.peak(0) - 2 * SIZE) < TOLERANCE
    found.restart()
    assert abs(found.peak(0) - SIZE) < TOLERANCE
    del kept
    assert abs(found.peak(0) - SIZE) < TOLERANCE, "the interval began with it"


@resident
def test_a_meter_closes_its_files():
    before = len(os.listdir("/proc/self/fd"))
    meters = [ResidentMeter() for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 20
    del meters
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@resident
def test_the_meter_of_a_cpu_is_the_resident_one():
    assert isinstance(default_meter(CPU), ResidentMeter)


def test_where_the_kernel_keeps_no_peak_memory_is_sampled_and_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(meter, "_CLEAR_REFS", tmp_path / "missing")
    with pytest.warns(UserWarning, match=r"not writable here: .*peaks inside operators are missed"):
        found = default_meter(CPU)
    assert isinstance(found, SampledMeter)


def test_every_meter_says_what_it_measures():
    sources = {kind.source for kind in (meter.CudaMeter, ResidentMeter, SampledMeter)}
    assert len(sources) == 3
    assert all(sources)


def test_a_machine_gives_what_is_available():
    assert 0 < installed_bytes(CPU) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limits", "nbytes"),
    [
        ({}, 1000),
        ({"memory.max": "max\n"}, 1000),
        ({"memory.max": "700\n"}, 700),
        ({"memory.max": "5000\n"}, 1000),
        ({"memory.limit_in_bytes": "600\n"}, 600),
    ],
)
def test_a_container_gives_no_more_than_its_limit(monkeypatch, tmp_path, limits, nbytes):
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(meter, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert installed_bytes(CPU) == nbytes
