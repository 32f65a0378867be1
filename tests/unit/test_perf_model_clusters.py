"""Estimates of clusters: one node is today's machine, more and faster hardware, and what the network costs."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._models.presets import MOE_PRESETS, PRESETS, T5_PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Network, find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import estimate, fits
from patrickstar._perf_model.workload import shape_workload
from patrickstar.errors import BudgetError, ConfigError

given = fixed_draws(40)
SERVER = find_machine("8xA100-40GB-11TB")
IDEAL = Network(bandwidth=1e30, latency_s=0)


def with_network(network, **host):
    return SERVER.model_copy(update={"network": network, "host": SERVER.host.model_copy(update=host)})


def seconds(step):
    return {channel.name: channel.seconds for channel in step.channels}


def amounts(step):
    return {channel.name: channel.amount for channel in step.channels}


gpts = st.builds(
    lambda layers, hidden, experts: Gpt(layers, 1024 * hidden, heads=16, sequence=1024, experts=experts),
    st.integers(4, 60),
    st.integers(1, 8),
    st.none() | st.builds(Experts, st.sampled_from([16, 64]), st.integers(1, 2), st.integers(1, 2)),
)
tps, eps, node_counts = st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 8, 16]), st.integers(2, 64)

BEFORE = (
    # Model, machine, GPUs, batch, checkpointing; seconds, bound, bytes of device, host and disk of one machine.
    ("gpt-12b", "8xV100-32GB", 1, 8, True, 10.25358836, 9.971176665, 34089730048, 148100063232, 0),
    ("gpt-12b", "8xV100-32GB", 8, 8, True, 10.03585595, 9.971176665, 29297526528, 18439268351, 0),
    ("gpt-8b", "RTX4090-desktop", 1, 4, True, 6.446955644, 6.275927654, 25769803776, 64000000000, 31379638271),
    ("t5-58b", "8xA100-40GB-11TB", 8, 4, True, 5.156191257, 5.106081012, 14183791616, 339822723072, 0),
    ("gpt-1b", "H200", 1, 4, False, 0.07421179583, 0.07067790079, 23534915584, 0, 0),
    ("gpt-55b", "8xA100-40GB", 8, 1, True, 3.922422535, 3.811540206, 42949672960, 470335979520, 0),
)


@pytest.mark.parametrize("case", BEFORE, ids=[f"{case[0]}-{case[1]}-{case[2]}" for case in BEFORE])
def test_one_node_has_the_figures_of_its_machine(case):
    name, machine_name, gpus, batch, recompute, *expected = case
    machine, shape = find_machine(machine_name), (PRESETS | T5_PRESETS)[name]
    mesh = Mesh(nodes=1, gpus=gpus, tp=1, ep=1)
    step = estimate(shape_workload(shape, batch, recompute, mesh), machine, mesh)
    assert shape_workload(shape, batch, recompute, mesh) == shape_workload(shape, batch, recompute)
    measured = [step.seconds, step.bound_s, step.device_bytes, step.host_bytes, step.disk_bytes]
    assert measured == pytest.approx(expected, rel=1e-6)
    alone = machine.model_copy(update={"network": IDEAL})
    assert estimate(shape_workload(shape, batch, recompute), alone, mesh) == step, "one node does not use its network"
    assert {"between nodes", "coordination"}.isdisjoint(seconds(step))


@given(gpts, tps, eps, st.integers(1, 16), st.sampled_from([1, 2, 4]), st.booleans())
def test_tiers_of_a_cluster_hold_all_model_data_within_their_capacity(gpt, tp, ep, replicas, nodes, recompute):
    assume(ep == 1 or (gpt.experts is not None and ep % tp == 0 and replicas * nodes * 8 % ep == 0))
    mesh = Mesh(replicas * nodes, 8, tp, ep, replica_nodes=nodes)
    work = shape_workload(gpt, 1, recompute, mesh)
    assume(fits(work, SERVER, mesh))
    step = estimate(work, SERVER, mesh)
    assert step.device_bytes <= SERVER.gpu.memory and step.host_bytes <= SERVER.host.memory
    on_devices = 8 * (step.device_bytes - work.non_model_bytes - work.working_bytes)
    assert on_devices + step.host_bytes + step.disk_bytes == pytest.approx(8 * step.model_data_bytes, rel=1e-3)
    parts = [(work.params, mesh.dense), (work.experts.params if work.experts else 0, mesh.experts)]
    copies = sum(2 * params / group.shards for params, group in parts if group.replicas > 1)
    owned = sum(params / (group.shards * group.replicas) for params, group in parts)
    assert step.model_data_bytes == pytest.approx(14 * owned + copies, abs=1)


def copied_seconds(work, machine, mesh, copied, resident, on_host, in_ram):
    """Return the seconds of the busiest channel on several nodes for given shares, implemented independently."""
    copy, own, gpus, streamed = work.params / 8, work.params / mesh.processes, 8, 1 - resident - on_host
    away, states_on_disk = 1 - resident, own * 12 * (1 - resident) * (1 - in_ram)
    if work.non_model_bytes + work.working_bytes + 2 * copy * copied + 14 * own * resident > machine.gpu.memory:
        return None
    if gpus * (2 * copy * (1 - copied) + own * (2 * away + 12 * away * in_ram)) > machine.host.memory:
        return None
    one_way = own * (2 * on_host + 12 * streamed) + 2 * copy * (1 - copied)
    ram = own * (28 * on_host + 24 * streamed) + 4 * copy * (1 - copied) + 2 * states_on_disk
    h2d, d2h = machine.transfer_rates(gpus)
    layers = math.ceil(4 * work.params / work.working_bytes)
    exchanged = 6 * copy * (mesh.nodes - 1) / mesh.nodes
    network = machine.network
    return max(
        work.operations / machine.gpu.matmul_rate(work.matrix_size)
        + (own * 28 * (resident + streamed) + work.other_bytes) / machine.gpu.memory_bandwidth,
        one_way / h2d,
        one_way / d2h,
        gpus * ram / machine.host.update_bandwidth(gpus, machine.host.cores // gpus),
        gpus * states_on_disk / machine.disk.read,
        6 * 7 / 8 * work.params / machine.links.gpu_gpu,
        gpus * exchanged / network.bandwidth + 2 * layers * (mesh.nodes - 1) * network.latency_s,
        2 * layers * (mesh.processes - 1) * network.latency_s,
    )


@given(st.integers(20, 120), st.integers(4, 12), node_counts, st.floats(1e9, 4e11), st.floats(0, 1e-4))
def test_no_shares_of_a_cluster_are_faster_than_the_chosen_ones(layers, hidden, nodes, bandwidth, latency_s):
    machine = with_network(Network(bandwidth=bandwidth, latency_s=latency_s), memory=400 * 10**9)
    gpt, mesh = Gpt(layers, 1024 * hidden, heads=16, sequence=1024), Mesh(nodes, 8)
    work = shape_workload(gpt, 1, True, mesh)
    grid = np.linspace(0, 1, 6)
    possible = (shares for shares in product(grid, grid, grid, grid) if shares[1] + shares[2] <= 1)
    tried = [copied_seconds(work, machine, mesh, *shares) for shares in possible]
    least = min((value for value in tried if value is not None), default=None)
    if not fits(work, machine, mesh):
        assert least is None, "it fits with some shares"
        return
    step = estimate(work, machine, mesh)
    assert least is None or step.bound_s <= least * (1 + 1e-6)
    shares = step.shares
    ample = with_network(machine.network, memory=machine.host.memory + 10**6)
    on_device = shares.retained * (1 - 1e-6), shares.resident * (1 - 1e-6)
    again = copied_seconds(work, ample, mesh, *on_device, shares.on_host, shares.in_ram)
    if again is not None and not shares.paged:
        assert again == pytest.approx(step.busiest.seconds, rel=1e-3), "the shares do not give the estimated time"


@given(gpts, tps, st.integers(2, 40), st.integers(1, 60))
def test_more_nodes_are_never_slower_if_the_network_is_not_the_limit(gpt, tp, nodes, further):
    gpt = replace(gpt, experts=None)
    machine = with_network(IDEAL)
    few_nodes, more_nodes = Mesh(nodes, 8, tp), Mesh(nodes + further, 8, tp)
    work = shape_workload(gpt, 1, True, few_nodes)
    assert work == shape_workload(gpt, 1, True, more_nodes), "a dense model's work depends on the batch only"
    assume(fits(work, machine, few_nodes))
    before, after = estimate(work, machine, few_nodes), estimate(work, machine, more_nodes)
    assert after.bound_s <= before.bound_s * (1 + 1e-9)
    # With a real network, what grows is the exchange between nodes: at most from a half to all of each copy.
    real_before, real_after = estimate(work, SERVER, few_nodes), estimate(work, SERVER, more_nodes)
    network = max(seconds(real_after)["between nodes"], seconds(real_after)["coordination"])
    assert real_after.bound_s <= max(real_before.bound_s, network) * (1 + 1e-9)
    ratio = amounts(real_after)["between nodes"] / amounts(real_before)["between nodes"]
    assert ratio == pytest.approx((1 - 1 / (nodes + further)) / (1 - 1 / nodes)) and ratio <= 2


@given(gpts, eps, st.sampled_from([2, 4, 16]), st.sampled_from(["bandwidth", "latency_s"]))
def test_a_better_network_is_never_slower(gpt, ep, nodes, better):
    assume(ep == 1 or gpt.experts is not None)
    mesh = Mesh(nodes, 8, 1, ep)
    work = shape_workload(gpt, 1, True, mesh)
    assume(fits(work, SERVER, mesh))
    network = SERVER.network
    changed = {"bandwidth": network.bandwidth * 2} if better == "bandwidth" else {"latency_s": network.latency_s / 2}
    after = estimate(work, with_network(network.model_copy(update=changed)), mesh)
    assert after.bound_s <= estimate(work, SERVER, mesh).bound_s * (1 + 1e-9)


def test_messages_between_nodes_take_their_latency():
    mesh = Mesh(nodes=12, gpus=8)
    work = shape_workload(PRESETS["gpt-12b"], 1, True, mesh)
    networks = [Network(bandwidth=25e9, latency_s=latency_s) for latency_s in (0, 1e-3)]
    steps = [estimate(work, with_network(network), mesh) for network in networks]
    layers = work.working_sets
    assert layers == math.ceil(4 * work.params / work.working_bytes) >= PRESETS["gpt-12b"].layers
    latencies = {name: seconds(steps[1])[name] - seconds(steps[0])[name] for name in ("between nodes", "coordination")}
    assert latencies["between nodes"] == pytest.approx(2 * layers * 11 * 1e-3)
    assert latencies["coordination"] == pytest.approx(2 * layers * 95 * 1e-3)
    # With collectives inside operators, processes agree on a plan, and compare once per step what they did.
    lockstep = Mesh(nodes=12, gpus=8, tp=2)
    step = estimate(shape_workload(PRESETS["gpt-12b"], 1, True, lockstep), SERVER, lockstep)
    assert seconds(step)["coordination"] == pytest.approx(95 * SERVER.network.latency_s)


@pytest.mark.parametrize(("ep", "inside"), [(2, 1), (8, 1), (16, 7 / 15), (64, 7 / 63)])
def test_tokens_are_exchanged_inside_nodes_as_far_as_groups_are(ep, inside):
    gpt, mesh = MOE_PRESETS["gpt-moe-52b"], Mesh(nodes=8, gpus=8, ep=ep)
    work = shape_workload(gpt, 4, True, mesh)
    step = estimate(work, SERVER, mesh)
    blocking = {channel.name: channel.blocking_s for channel in step.channels}
    sent, load = work.experts.exchanged_bytes, work.experts.imbalance
    assert blocking["between GPUs"] == pytest.approx(load * inside * sent / SERVER.links.gpu_gpu)
    latency_s = work.experts.exchanges * (mesh.expert_nodes - 1) * SERVER.network.latency_s
    others = load * (1 - inside) * sent * 8 / SERVER.network.bandwidth
    assert blocking["between nodes"] == pytest.approx(others + latency_s)
    assert blocking["compute"] == pytest.approx(blocking["between GPUs"] + blocking["between nodes"])
    gathered = 6 * 7 / 8 * work.params + 6 * (1 - 1 / mesh.experts.shards) * work.experts.params
    assert amounts(step)["between GPUs"] == pytest.approx(gathered + inside * sent)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 16), (2, 8)])
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_from_the_free_tokens_on_computation_and_what_it_waits_for_are_the_bottleneck(tp, ep, batch):
    mesh = Mesh(nodes=8, gpus=8, tp=tp, ep=ep)
    step = estimate(shape_workload(MOE_PRESETS["gpt-moe-52b"], batch, True, mesh), SERVER, mesh)
    busy = seconds(step)
    compute = busy.pop("compute")
    assert (step.free_tokens <= step.workload.tokens) is (compute >= max(busy.values()))


def test_computation_waits_for_the_busiest_process_or_for_its_buffer():
    gpt, mesh = MOE_PRESETS["gpt-moe-52b"], Mesh(nodes=16, gpus=8, ep=128)
    free = shape_workload(gpt, 4, True, mesh)
    capped = replace(gpt, experts=replace(gpt.experts, capacity_factor=1.25))
    bounded = shape_workload(capped, 4, True, mesh)
    assert 1 < free.experts.imbalance < 1.1 and bounded.experts.imbalance == 1.25
    assert bounded.experts.operations == free.experts.operations
    assert bounded.non_model_bytes > free.non_model_bytes
    slow, fast = (seconds(estimate(work, SERVER, mesh))["compute"] for work in (bounded, free))
    rate = SERVER.matmul_rate(free.experts.matrix_size)
    on_path = free.experts.operations / rate + free.experts.exchanged_bytes * 8 / SERVER.network.bandwidth
    assert slow - fast == pytest.approx((1.25 - free.experts.imbalance) * on_path, rel=0.05)


def test_what_a_model_or_a_machine_lacks_is_refused():
    gpt, moe = PRESETS["gpt-12b"], MOE_PRESETS["gpt-moe-52b"]
    with pytest.raises(ConfigError, match=r"ep=8: the model has no experts; try ep=1"):
        shape_workload(gpt, 1, True, Mesh(gpus=8, ep=8))
    with pytest.raises(ConfigError, match=r"tp=8 does not divide the model's 12 heads"):
        shape_workload(PRESETS["gpt2-124m"], 1, True, Mesh(gpus=8, tp=8))
    with pytest.raises(ConfigError, match=r"ep=24 does not divide the model's 128 experts"):
        shape_workload(moe, 1, True, Mesh(nodes=3, gpus=8, ep=24))
    machine = find_machine("8xV100-32GB")
    with pytest.raises(ConfigError, match=r"8xV100-32GB has no network; add a section \[network\]"):
        estimate(shape_workload(gpt, 1), machine, Mesh(nodes=2))
    small = with_network(SERVER.network, memory=10**9).model_copy(update={"disk": None})
    huge = shape_workload(PRESETS["gpt-175b"], 1, True, Mesh(2, 8))
    with pytest.raises(BudgetError, match=r"the hosts of 2 nodes. Try .* more host memory per node$"):
        estimate(huge, small, Mesh(2, 8))
