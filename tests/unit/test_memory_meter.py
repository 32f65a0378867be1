"""Test meters of non-model data on real memory."""

import gc
import os

import pytest
import torch

from patrickstar._hardware import memory_meter as meter
from patrickstar._hardware.memory_meter import AllocatorMeter, ResidentMeter, SampledMeter, host_meter

MIB = 1024**2
SIZE = 96 * MIB
TOLERANCE = 16 * MIB
"""Bytes that the interpreter and the C library may allocate or free besides the tensor."""

CPU = torch.device("cpu")

unresettable = not os.access("/proc/self/clear_refs", os.W_OK)
resident = pytest.mark.skipif(unresettable, reason="this kernel keeps no resettable peak of resident memory")


def allocate() -> torch.Tensor:
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


def test_allocation_and_release_are_measured(calibrated):
    assert calibrated.now(0) < TOLERANCE
    tensor = allocate()
    assert abs(calibrated.now(0) - SIZE) < TOLERANCE
    assert calibrated.peak(0) >= SIZE - TOLERANCE
    del tensor
    calibrated.reclaim()
    assert calibrated.now(0) < TOLERANCE


def test_chunks_are_not_counted(calibrated):
    chunk = allocate()
    activation = allocate()
    assert abs(calibrated.now(chunk.nbytes) - SIZE) < TOLERANCE
    assert abs(calibrated.peak(chunk.nbytes) - SIZE) < TOLERANCE
    del activation
    assert calibrated.now(chunk.nbytes) < TOLERANCE
    assert calibrated.now(4 * SIZE) == 0, "non-model data is never negative"


def test_calibration_sets_the_baseline(calibrated):
    before, chunk = allocate(), allocate()
    calibrated.calibrate(chunk.nbytes)
    calibrated.restart()
    assert calibrated.now(chunk.nbytes) < TOLERANCE
    assert calibrated.peak(chunk.nbytes) < TOLERANCE
    after = allocate()
    assert abs(calibrated.now(chunk.nbytes) - after.nbytes) < TOLERANCE
    del before, after
    assert calibrated.now(chunk.nbytes) == 0


@resident
def test_restart_resets_the_peak_to_current_usage():
    found = ready(ResidentMeter())
    lasting, passing = allocate(), allocate()
    del passing
    for _ in range(2):
        assert abs(found.peak(0) - 2 * SIZE) < TOLERANCE, "reading a peak does not reset it"
    found.restart()
    assert abs(found.peak(0) - SIZE) < TOLERANCE
    del lasting
    assert abs(found.peak(0) - SIZE) < TOLERANCE, "the tensor existed at the restart"
    found.restart()
    assert found.peak(0) < TOLERANCE


@resident
def test_meter_closes_its_files():
    before = len(os.listdir("/proc/self/fd"))
    meters = [ResidentMeter() for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 20
    del meters
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_cpu_counts_tensors_where_they_are_allocated_and_a_sampled_meter_warns(monkeypatch, tmp_path):
    assert isinstance(host_meter(), AllocatorMeter)
    monkeypatch.setattr(meter, "cpu_allocator", lambda: None)
    monkeypatch.setattr(meter, "_CLEAR_REFS", tmp_path / "missing")
    with pytest.warns(UserWarning, match=r"not writable here: .*peaks inside operators are missed"):
        found = host_meter()
    assert isinstance(found, SampledMeter)


def test_every_meter_describes_its_source():
    sources = {kind.source for kind in (meter.DeviceMeter, AllocatorMeter, ResidentMeter, SampledMeter)}
    assert len(sources) == 4 and all(sources)
