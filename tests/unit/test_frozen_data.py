"""Frozen parameters in the performance model: their bytes are conserved, and they are only read."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import estimate
from patrickstar._perf_model.step_program import StepProgram
from patrickstar._perf_model.workload import Workload
from patrickstar.errors import BudgetError

GB = 10**9


def machine(device: int, host: int, disk: int = 0) -> Machine:
    return Machine(
        name="any",
        source="invented",
        gpu=Gpu(count=8, memory=device, matmul_tflops=100, memory_bandwidth=1e12),
        host=Host(memory=host, memory_bandwidth=5e10, cores=8),
        links=Links(h2d=2e10, d2h=2e10, gpu_gpu=5e10),
        disk=DiskDrive(capacity=disk, read=5e9, write=5e9) if disk else None,
    )


def adapters(frozen_bytes: int, **changes) -> Workload:
    """Return the workload of small adapters in fp32 beside a frozen base of layers of a fiftieth of its bytes."""
    work = dict(batch=1, tokens=1024, checkpointing=True, matrix_size=2048, non_model_bytes=GB)
    work |= dict(params=10_000_000, param_bytes=4.0, frozen_params=frozen_bytes // 2, frozen_bytes=frozen_bytes)
    work |= dict(operations=3.0 * 1024 * frozen_bytes, working_bytes=frozen_bytes // 25)
    return Workload(**work | changes)


@settings(max_examples=draws(40), deadline=None)
@given(st.integers(1, 60), st.integers(3, 30), st.integers(1, 40), st.sampled_from([0, 100 * GB]))
def test_frozen_bytes_are_on_some_tier_and_never_written(frozen, device, host, disk):
    work = adapters(frozen * GB)
    try:
        found = estimate(work, machine(device * GB, host * GB, disk))
    except BudgetError:
        assume(False)
    assert found.model_data_bytes == 16 * work.params + work.frozen_bytes
    on_device = found.device_bytes - work.non_model_bytes - work.working_bytes
    assert on_device + found.host_bytes + found.disk_bytes == pytest.approx(found.model_data_bytes, rel=1e-6)
    amounts = {channel.name: channel.amount for channel in found.channels}
    assert amounts["device to host"] <= 12 * work.params, "gradients or states of adapters alone"
    moved = 2 * work.frozen_bytes * (1 - found.frozen_shares.retained)
    assert amounts["host to device"] == pytest.approx(moved, abs=16 * work.params)
    if disk:
        assert amounts["disk write"] <= 16 * work.params
        read = 2 * work.frozen_bytes * found.frozen_shares.paged
        assert amounts["disk read"] == pytest.approx(read, abs=16 * work.params)


def test_a_frozen_model_fits_where_a_trained_one_does_not_and_is_faster():
    small = machine(8 * GB, 16 * GB)
    frozen = adapters(14 * GB)
    trained = adapters(0, params=7 * GB, param_bytes=2.0, operations=4.0 * 14 * GB * 1024, working_bytes=GB // 2)
    with pytest.raises(BudgetError, match=r"91\.27 GiB of model data"):
        estimate(trained, small)
    large = machine(8 * GB, 200 * GB)
    assert estimate(frozen, small).seconds < estimate(trained, large).seconds


def test_processes_share_frozen_parameters_and_gather_them_twice():
    work = adapters(40 * GB)
    program = StepProgram(work, machine(20 * GB, 100 * GB), Mesh(gpus=4))
    assert program.nbytes == 16 * work.params / 4 + work.frozen_bytes / 4
    assert program.frozen.sent_in_node == pytest.approx(2 * 3 / 4 * work.frozen_bytes)
    assert program.frozen.sent_between_nodes == 0
    replicated = StepProgram(work, machine(20 * GB, 100 * GB), Mesh(gpus=4)).frozen
    assert replicated.nbytes == work.frozen_bytes / 4
