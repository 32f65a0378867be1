"""Performance model: bytes are conserved, tiers stay within budget, and faster hardware is never slower."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import best_estimate, estimate, fits, largest_batch, min_extra_bytes
from patrickstar._perf_model.step_program import MemoryTier
from patrickstar._perf_model.workload import PARAM_BYTES, STATE_BYTES, UPDATE_BYTES, Workload, shape_workload
from patrickstar.errors import BudgetError

machines = st.builds(
    Machine,
    name=st.just("any"),
    source=st.just("invented"),
    gpu=st.builds(
        Gpu,
        count=st.just(8),
        memory=st.integers(4, 80).map(lambda n: n << 30),
        matmul_tflops=st.floats(10, 1000),
        memory_bandwidth=st.floats(1e11, 3e12),
    ),
    host=st.builds(
        Host,
        memory=st.integers(16, 1000).map(lambda n: n << 30),
        memory_bandwidth=st.floats(1e10, 5e11),
        cores=st.integers(4, 128),
    ),
    links=st.builds(Links, h2d=st.floats(5e9, 5e10), d2h=st.floats(5e9, 5e10), gpu_gpu=st.floats(1e10, 3e11)),
    disk=st.none() | st.just(DiskDrive(capacity="2TB", read="3GB", write="2GB")),
)
works = st.builds(
    lambda billions, layers, tokens: Workload(
        params=int(billions * 1e9),
        batch=tokens // 1024,
        tokens=tokens,
        checkpointing=True,
        operations=8.0 * billions * 1e9 * tokens,
        matrix_size=2048,
        non_model_bytes=1 << 30,
        working_bytes=int(billions * 1e9 / layers) * 4,
    ),
    st.floats(0.1, 100),
    st.integers(10, 100),
    st.sampled_from([1024, 4096, 16384]),
)
RESOURCES = ["links.h2d", "gpu.memory", "gpu.matmul_tflops", "host.memory", "host.memory_bandwidth"]
few = settings(max_examples=draws(25), deadline=None)


def changed(machine, part, **values):
    return machine.model_copy(update={part: getattr(machine, part).model_copy(update=values)})


def best(work, machine, processes):
    try:
        return estimate(work, machine, Mesh(gpus=processes))
    except BudgetError as error:
        assert error.short_bytes > 0
        return None


@few
@given(works, machines, st.sampled_from([1, 2, 8]))
def test_all_bytes_are_placed_within_budget_and_the_busiest_channel_is_a_lower_bound(work, machine, processes):
    found = best(work, machine, processes)
    assume(found is not None)
    assert found.device_bytes <= machine.gpu.memory and found.host_bytes <= machine.host.memory
    assert found.disk_bytes <= (machine.disk.capacity if machine.disk is not None else 0)
    on_devices = (found.device_bytes - work.non_model_bytes - work.working_bytes) * processes
    model_data = (PARAM_BYTES + STATE_BYTES) * work.params
    assert found.shares.retained + found.shares.resident + found.shares.paged <= 1 + 1e-6
    assert on_devices + found.host_bytes + found.disk_bytes == pytest.approx(model_data, rel=1e-3)
    assert found.seconds >= max(channel.seconds for channel in found.channels) >= found.bound_s
    names = {channel.name for channel in found.channels}
    assert names >= {"compute", "host to device", "device to host", "host memory"}


@few
@given(works, machines, st.sampled_from(RESOURCES))
def test_larger_memory_and_faster_hardware_are_never_slower(work, machine, resource):
    before = best(work, machine, 1)
    assume(before is not None)
    part, name = resource.split(".")
    after = best(work, changed(machine, part, **{name: 2 * getattr(getattr(machine, part), name)}), 1)
    assert after.bound_s <= before.bound_s * (1 + 1e-6)
    assert after.seconds <= before.seconds * (1 + 1e-6), "the pipeline's fill counts, too"


@few
@given(works, machines)
def test_from_the_free_tokens_on_computation_is_the_bottleneck(work, machine):
    found = best(work, machine, 1)
    assume(found is not None)
    compute = next(channel.seconds for channel in found.channels if channel.name == "compute")
    others = max(channel.seconds for channel in found.channels if channel.name != "compute")
    assert (found.free_tokens <= work.tokens) is (compute >= others)


def seconds_of(work, machine, processes, copied, resident, on_host, in_ram):
    """Return the seconds of the busiest channel for given shares, implemented independently; None if they don't fit."""
    streamed, below = 1 - resident - on_host, 1 - copied - resident
    part, away = work.params / processes, 1 - resident
    disk_bytes = work.params * 12 * away * (1 - in_ram)
    if work.non_model_bytes + work.working_bytes + part * (2 * copied + 14 * resident) > machine.gpu.memory:
        return None
    if work.params * (2 * below + 12 * away * in_ram) > machine.host.memory:
        return None
    if disk_bytes > (machine.disk.capacity if machine.disk is not None else 0):
        return None
    down = part * (2 * on_host + 12 * streamed)
    ram = part * (UPDATE_BYTES * on_host + 24 * streamed + 2 * below) + 2 * disk_bytes / processes
    h2d, d2h = machine.transfer_rates(processes)
    channels = [
        work.operations / machine.gpu.matmul_rate(work.matrix_size)
        + part * UPDATE_BYTES * (resident + streamed) / machine.gpu.memory_bandwidth,
        (down + part * 2 * (below + max(0, streamed - copied))) / h2d,
        down / d2h,
        ram * processes / machine.host.update_bandwidth(processes, machine.host.cores // processes or 1),
    ]
    if machine.disk is not None:
        channels += [disk_bytes / machine.disk.read, disk_bytes / machine.disk.write]
    if processes > 1:
        channels.append(6 * (processes - 1) / processes * work.params / machine.links.gpu_gpu)
    return max(channels)


@few
@given(works, machines, st.sampled_from([1, 2, 8]))
def test_no_shares_are_faster_than_the_chosen_ones(work, machine, processes):
    grid = np.linspace(0, 1, 9)
    tried = (
        seconds_of(work, machine, processes, copied, resident, on_host, in_ram)
        for copied, resident, on_host, in_ram in product(grid, grid, grid, grid)
        if copied + resident <= 1 and resident + on_host <= 1
    )
    least = min((seconds for seconds in tried if seconds is not None), default=None)
    found = best(work, machine, processes)
    if found is None:
        assert least is None, "it fits with some shares"
        return
    if least is not None:
        assert found.bound_s <= least * (1 + 1e-6)
    shares = found.shares
    ample = changed(machine, "host", memory=machine.host.memory + 1000)
    on_device = shares.retained * (1 - 1e-6), shares.resident * (1 - 1e-6)
    again = seconds_of(work, ample, processes, *on_device, shares.on_host, shares.in_ram)
    if again is not None:
        assert again == pytest.approx(found.busiest.seconds, rel=1e-3), "the shares do not give the estimated time"


# Most draws fit and are skipped.
@settings(few, suppress_health_check=[HealthCheck.filter_too_much])
@given(works, machines, st.sampled_from([1, 8]))
def test_the_missing_bytes_are_sufficient_and_minimal(work, machine, processes):
    assume(not fits(work, machine, Mesh(gpus=processes)))

    def with_more(tier, nbytes):
        if tier is not MemoryTier.DISK:
            part = machine.gpu if tier is MemoryTier.DEVICE else machine.host
            return changed(machine, "gpu" if tier is MemoryTier.DEVICE else "host", memory=part.memory + nbytes)
        capacity = machine.disk.capacity if machine.disk is not None else 0
        return machine.model_copy(update={"disk": DiskDrive(capacity=capacity + nbytes, read="3GB", write="2GB")})

    missing = {tier: min_extra_bytes(work, machine, Mesh(gpus=processes), tier) for tier in MemoryTier}
    sufficient = {tier: more for tier, more in missing.items() if more is not None}
    with pytest.raises(BudgetError) as caught:
        estimate(work, machine, Mesh(gpus=processes))
    assert caught.value.short_bytes == min(sufficient.values(), default=None)
    assert all(f" more {tier.value}" in str(caught.value) for tier in sufficient)
    for tier, more in sufficient.items():
        # The solver's tolerance is relative to the largest coefficient of a constraint.
        tolerance = int(1e-5 * (14 * work.params + work.non_model_bytes))
        assert fits(work, with_more(tier, more + tolerance), Mesh(gpus=processes))
        if more > tolerance:
            assert not fits(work, with_more(tier, more - tolerance), Mesh(gpus=processes))


V100 = find_machine("8xV100-32GB")


def test_batch_and_checkpointing_are_chosen_by_tokens_per_second():
    work_of = partial(shape_workload, Gpt(20, 2048, 16))
    chosen = best_estimate(work_of, V100, Mesh())
    speeds = {}
    for batch, recompute in product((1, 2, 4, 8, 16, 32, 64, 128), (True, False)):
        if fits(work_of(batch, recompute), V100, Mesh()):
            step = estimate(work_of(batch, recompute), V100)
            speeds[batch, recompute] = step.workload.tokens / step.seconds
    assert len(speeds) > 5
    fastest = max(speeds.values())
    assert chosen.workload.tokens / chosen.seconds == pytest.approx(fastest, rel=1e-3)
    assert not chosen.workload.checkpointing, "recomputation costs time, and here the activations fit"


@pytest.mark.parametrize("recompute", [True, False])
def test_the_largest_batch_fits_and_one_more_does_not(recompute):
    work_of = partial(shape_workload, Gpt(60, 4096, 16))
    batch = largest_batch(work_of, V100, Mesh(), recompute)
    assert batch > 0
    assert fits(work_of(batch, recompute), V100, Mesh()) and not fits(work_of(batch + 1, recompute), V100, Mesh())
    assert largest_batch(work_of, V100, Mesh(), recompute, below=2) == 1
    tiny = changed(V100, "gpu", memory=1 << 20)
    assert largest_batch(work_of, tiny, Mesh(), recompute) == 0


def test_without_a_gpu_both_tiers_share_the_host_memory():
    work = Workload(10**9, 1, 1024, True, 1e13, 1024, 1 << 30, 1 << 28)
    model_data = (PARAM_BYTES + STATE_BYTES) * work.params
    for memory, possible in ((model_data + (3 << 30), True), (model_data + (1 << 30), False)):
        host = Host(memory=memory, memory_bandwidth="20GB", cores=2, matmul_tflops=0.5)
        machine = Machine(name="laptop", source="invented", host=host)
        found = best(work, machine, 1)
        assert (found is not None) is possible
        assert found is None or found.device_bytes + found.host_bytes <= memory


@pytest.mark.parametrize(("processes", "gigabytes"), [(1, 300), (4, 240)])
def test_lock_free_updates_hide_the_disk_behind_the_other_channels(processes, gigabytes):
    machine = find_machine("8xA100-40GB-11TB")
    machine = changed(machine, "host", memory=gigabytes * 10**9)
    work = shape_workload(Gpt(34, 8192, heads=64, sequence=512), 4, True)
    mesh = Mesh(gpus=processes)
    exact, late = estimate(work, machine, mesh), estimate(work, machine, mesh, lock_free=True)
    assert exact.channels != late.channels and late.seconds < exact.seconds
    assert late.staleness == math.ceil(late.sweep_s / late.seconds) >= 2
    assert late.host_bytes >= 6 * work.params and late.host_bytes <= machine.host.memory
    assert exact.seconds >= exact.sweep_s


def test_split_masters_move_and_store_fewer_bytes():
    machine = find_machine("RTX4090-desktop")
    whole = estimate(shape_workload(Gpt(60, 4096, heads=16), 1, True), machine)
    split = estimate(replace(whole.workload, splits_masters=True), machine)
    assert whole.shares.in_ram < 1, "the drive is used"
    assert split.model_data_bytes == round(12 / 14 * whole.model_data_bytes)
    assert split.seconds < whole.seconds and split.host_bytes + split.disk_bytes < whole.host_bytes + whole.disk_bytes
    fp32 = replace(whole.workload, param_bytes=4)
    assert replace(fp32, splits_masters=True).state_bytes == fp32.state_bytes == STATE_BYTES


def test_buffers_of_lock_free_updates_that_do_not_fit_are_refused():
    machine = find_machine("RTX4090-desktop")
    work = shape_workload(Gpt(60, 4096, heads=16), 1, True)
    assert 6 * work.params > machine.host.memory
    estimate(work, machine)
    with pytest.raises(BudgetError):
        estimate(work, machine, lock_free=True)
