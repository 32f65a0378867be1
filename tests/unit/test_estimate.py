"""Estimates: bytes are conserved, no tier is over its budget, more of anything is never slower."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patrickstar.errors import BudgetError
from patrickstar.schedule.estimate import PARAM_BYTES, STATE_BYTES, Workload, estimate
from patrickstar.schedule.machine import DiskDrive, Gpu, Host, Links, Machine

machines = st.builds(
    Machine,
    name=st.just("any"),
    source=st.just("made up"),
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
        layers=layers,
        tokens=tokens,
        operations=8.0 * billions * 1e9 * tokens,
        matrix_size=2048,
        non_model_bytes=1 << 30,
        working_bytes=int(billions * 1e9 / layers) * 4,
    ),
    st.floats(0.1, 100),
    st.integers(10, 100),
    st.sampled_from([1024, 4096, 16384]),
)
few = settings(max_examples=25, deadline=None)


def best(work, machine, processes):
    try:
        return estimate(work, machine, processes)
    except BudgetError as error:
        assert error.short_bytes > 0
        return None


@few
@given(works, machines, st.sampled_from([1, 2, 8]))
def test_all_bytes_lie_somewhere_and_no_tier_is_over_its_budget(work, machine, processes):
    found = best(work, machine, processes)
    assume(found is not None)
    assert found.device_bytes <= machine.gpu.memory and found.host_bytes <= machine.host.memory
    assert found.disk_bytes <= (machine.disk.capacity if machine.disk is not None else 0)
    on_devices = (found.device_bytes - work.non_model_bytes - work.working_bytes) * processes
    model_data = (PARAM_BYTES + STATE_BYTES) * work.params
    # What stays on the device of the parameters has a copy on the host.
    kept = found.shares.kept * PARAM_BYTES * work.params
    assert on_devices - kept + found.host_bytes + found.disk_bytes == pytest.approx(model_data, rel=1e-3)


@few
@given(works, machines, st.sampled_from([1, 2, 8]))
def test_the_step_is_as_long_as_its_busiest_lane_at_least(work, machine, processes):
    found = best(work, machine, processes)
    assume(found is not None)
    assert found.seconds >= found.bound_s == max(lane.seconds for lane in found.lanes)
    assert {lane.name for lane in found.lanes} >= {"compute", "host to device", "device to host", "host memory"}


@few
@given(works, machines, st.sampled_from(["h2d", "memory", "bandwidth", "tflops"]))
def test_more_is_never_slower(work, machine, what):
    before = best(work, machine, 1)
    assume(before is not None)
    more = {
        "h2d": {"links": machine.links.model_copy(update={"h2d": machine.links.h2d * 2})},
        "memory": {"gpu": machine.gpu.model_copy(update={"memory": machine.gpu.memory * 2})},
        "bandwidth": {"host": machine.host.model_copy(update={"memory_bandwidth": machine.host.memory_bandwidth * 2})},
        "tflops": {"gpu": machine.gpu.model_copy(update={"matmul_tflops": machine.gpu.matmul_tflops * 2})},
    }[what]
    after = best(work, machine.model_copy(update=more), 1)
    assert after.bound_s <= before.bound_s * (1 + 1e-9)


@few
@given(works, machines)
def test_from_the_free_tokens_on_computing_is_the_slowest(work, machine):
    found = best(work, machine, 1)
    assume(found is not None)
    compute = next(lane.seconds for lane in found.lanes if lane.name == "compute")
    others = max(lane.seconds for lane in found.lanes if lane.name != "compute")
    assert (found.free_tokens <= work.tokens) is (compute >= others)


def test_what_does_not_fit_says_by_how_much_and_that_is_enough():
    work = Workload(10**11, 100, 1024, 1e15, 2048, 1 << 30, 1 << 30)
    machine = Machine(
        name="small",
        source="made up",
        gpu=Gpu(count=1, memory="8GiB", matmul_tflops=50, memory_bandwidth="400GB"),
        host=Host(memory="64GiB", memory_bandwidth="40GB", cores=8),
        links=Links(h2d="12GB", d2h="12GB"),
    )
    with pytest.raises(BudgetError, match="more host memory, or a disk") as caught:
        estimate(work, machine)
    memory = machine.host.memory + caught.value.short_bytes
    # A grid of shares can't fill the device to the last byte.
    enough = int(memory * 1.02)
    larger = machine.model_copy(update={"host": machine.host.model_copy(update={"memory": enough})})
    assert estimate(work, larger).host_bytes <= enough


def test_where_the_host_computes_both_tiers_share_its_memory():
    work = Workload(10**9, 20, 1024, 1e13, 1024, 1 << 30, 1 << 28)
    model_data = (PARAM_BYTES + STATE_BYTES) * work.params
    for memory, fits in ((model_data + (3 << 30), True), (model_data + (1 << 30), False)):
        host = Host(memory=memory, memory_bandwidth="20GB", cores=2, matmul_tflops=0.5)
        machine = Machine(name="laptop", source="made up", host=host)
        found = best(work, machine, 1)
        assert (found is not None) is fits
        assert found is None or found.device_bytes + found.host_bytes <= memory
