"""The probe moves what it says, and leaves nothing behind."""

import os
import threading

import pytest

from patrickstar._dry_run.machine_profile import measure_disk, rate_curve
from patrickstar._hardware.worker_pool import THREAD_NAME
from patrickstar._perf_model.machine_spec import Gpu
from patrickstar.errors import DiskError


def test_a_probe_gives_rates_leaves_no_thread_and_no_file_and_names_a_directory_that_is_not_there(tmp_path):
    rates = measure_disk(tmp_path, chunk_bytes=1 << 20)
    assert rates.read > 0 and rates.write > 0
    assert not os.listdir(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    with pytest.raises(DiskError, match="missing does not exist"):
        measure_disk(tmp_path / "missing")


def test_the_rates_of_products_are_on_the_curve_that_a_machine_has():
    gpu = Gpu(count=1, memory=1, matmul_tflops=905, memory_bandwidth=1, half_rate_size=1630)
    measured = {size: gpu.matmul_rate(size) / 1e12 for size in (1024, 2048, 4096, 8192)}
    limit, half_rate_size = rate_curve(measured)
    assert (limit, half_rate_size) == (pytest.approx(905), 1630)


@pytest.mark.parametrize("tflops", [{256: 2.0}, {256: 3.0, 512: 3.0, 1024: 2.9}, {256: 0.5, 512: 1.0, 1024: 2.0}])
def test_products_on_no_such_curve_have_the_rate_of_the_largest(tflops):
    assert rate_curve(tflops) == (max(tflops.items())[1], 0)
