"""Bytes of collectives and of model data against the closed forms, to the byte."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._perf_model.collective_costs import all_reduce_bytes, exchange_bytes, replica_bytes, shard_bytes
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.linear_program import Variables
from patrickstar._perf_model.mesh import DataParallelGroup, Mesh
from patrickstar._perf_model.model_data import ModelDataShare
from patrickstar._perf_model.param_placement import ShareVariables
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import Workload, shape_workload

given = fixed_draws(200)
sizes = st.sampled_from([1, 2, 3, 4, 8, 16, 96])
numels = st.integers(1, 2 * 10**12)
WORK = Workload(10**9, 1, 1024, 1.0, 1e13, 1024, 1 << 30, 1 << 28)


def to_the_byte(measured, exact):
    return abs(Fraction(measured) - exact) < Fraction(1, 2)


@given(numels, sizes, sizes, st.integers(1, 5))
def test_two_levels_of_transport_move_the_bytes_of_their_table(numel, shards, replicas, gathers):
    group, processes = DataParallelGroup(shards, replicas), shards * replicas
    inside = Fraction(2 * numel * (gathers + 1) * (shards - 1), shards)
    between = Fraction(numel * (replicas - 1), processes)
    assert to_the_byte(shard_bytes(numel, shards, gathers), inside)
    assert to_the_byte(replica_bytes(numel, group), 6 * between)


@given(numels, sizes, sizes, st.sampled_from([1, 2, 4]))
def test_replicas_of_several_nodes_gather_over_the_network(numel, nodes, replicas, gpus):
    shards, processes = nodes * gpus, nodes * gpus * replicas
    variables = Variables(ShareVariables.COUNT)
    data = ModelDataShare(numel, WORK, DataParallelGroup(shards, replicas, nodes), gpus, variables, 0)
    gathered = Fraction(6 * numel * (shards - 1), shards)
    exchanged = Fraction(6 * numel * (replicas - 1), processes)
    # One of a node's `gpus` links in a ring leaves it.
    crossing = gathered / gpus if nodes > 1 else 0
    assert to_the_byte(data.sent_between_nodes, exchanged + crossing)
    assert to_the_byte(data.sent_in_node, gathered - crossing)
    assert data.messages_between_nodes == 2 * (replicas - 1) + 3 * (nodes - 1)
    if replicas == 1:  # flat: no copies
        assert to_the_byte(data.nbytes, Fraction(14 * numel, processes))
        sent = data.sent_in_node + data.sent_between_nodes
        assert to_the_byte(sent, Fraction(6 * numel * (processes - 1), processes))


@given(numels, sizes, sizes)
@pytest.mark.parametrize(("splits", "nbytes"), [(False, 14), (True, 12)])
def test_model_data_of_a_process_are_bytes_per_owned_element_and_2_of_the_replicas_copy(
    splits, nbytes, numel, shards, replicas
):
    variables, work = Variables(ShareVariables.COUNT), replace(WORK, splits_masters=splits)
    data = ModelDataShare(numel, work, DataParallelGroup(shards, replicas), shards, variables, 0)
    copy = Fraction(2 * numel, shards) if replicas > 1 else 0
    exact = Fraction(nbytes * numel, shards * replicas) + copy
    assert to_the_byte(data.nbytes, exact)
    # The tiers of a node hold the bytes of its processes, wherever the shares place them.
    for resident, copied, in_ram in ((0.25, 0.5, 0.25), (1.0, 0.0, 0.0), (0.0, 1.0, 0.5)):
        shares = dict.fromkeys(range(1, 1 + ShareVariables.COUNT), 0.0) | {0: 1.0, 1: copied, 2: resident}
        shares |= {6: in_ram, 7: 1 - resident - in_ram}
        placed = sum(
            count * sum(coefficient * shares[index] for index, coefficient in enumerate(expression))
            for count, expression in ((shards, data.device_bytes), (1, data.host_bytes), (1, data.disk_bytes))
        )
        assert placed == pytest.approx(float(shards * exact), rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_tensor_parallelism_sends_eight_times_the_hidden_states_of_a_layer_and_twelve_with_recomputation(tp, batch):
    mesh, hidden = Mesh(gpus=8, tp=tp), 1024

    def sent(layers, recompute):
        gpt = Gpt(layers, hidden, heads=16, sequence=512)
        return shape_workload(gpt, batch, recompute, mesh).tensor_parallel_bytes

    per_unit = Fraction(tp - 1, tp) * 2 * batch * 512 * hidden
    for recompute, count in ((False, 8), (True, 12)):
        assert to_the_byte(sent(9, recompute) - sent(8, recompute), count * per_unit)
        assert to_the_byte(sent(8, recompute) - 8 * (sent(9, recompute) - sent(8, recompute)), 4 * per_unit)
    assert to_the_byte(all_reduce_bytes(batch * 512 * hidden, tp), 2 * per_unit)


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 8), (2, 4), (4, 8)])
@pytest.mark.parametrize("top_k", [1, 2])
def test_expert_parallelism_exchanges_routed_tokens_four_times_per_layer_and_six_with_recomputation(tp, ep, top_k):
    mesh, hidden = Mesh(gpus=8, tp=tp, ep=ep), 1024
    gpt = Gpt(layers=12, hidden=hidden, heads=16, sequence=512, experts=Experts(16, top_k, every=2))
    t5 = T5(layers=6, hidden=hidden, heads=16, ffn=4096, sequence=512, experts=Experts(16, top_k))
    # The processes of a tensor-parallel group have the same tokens, and route equal parts of them.
    per_exchange = 2 * Fraction(3 * 512, tp) * top_k * hidden * Fraction(ep - 1, ep)
    for workload, layers in ((shape_workload(gpt, 3, True, mesh), 6), (shape_workload(t5, 3, True, mesh), 12)):
        assert to_the_byte(workload.experts.exchanged_bytes, 6 * layers * per_exchange)
    work = shape_workload(gpt, 3, False, mesh)
    assert work.experts.exchanges == 24
    assert to_the_byte(work.experts.exchanged_bytes, 24 * per_exchange)
    assert to_the_byte(exchange_bytes(1536, hidden, ep), 2 * 1536 * hidden * Fraction(ep - 1, ep))


def test_an_expert_layer_gathers_tokens_over_tensor_parallel_processes_instead_of_adding_outputs():
    gpt = Gpt(8, 1024, heads=16, sequence=512)
    dense = shape_workload(gpt, 1, False, Mesh(1, 8, 2))
    moe = shape_workload(replace(gpt, experts=Experts(8)), 1, False, Mesh(gpus=8, tp=2, ep=4))
    # Half of an all-reduce less in forward and in backward, in each of eight layers.
    assert dense.tensor_parallel_bytes - moe.tensor_parallel_bytes == 8 * all_reduce_bytes(512 * 1024, 2)
