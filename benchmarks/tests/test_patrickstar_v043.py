"""Simulation of the original PatrickStar: published throughputs, consistency, monotonicity, activation curve."""

from dataclasses import fields
from math import isclose

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from papers.counts import checkpoint_bytes, embedding_numel, layer_tensors, paper_operations, saved_bytes
from patrickstar_v043.activation_curve import non_model_bytes, simulate_transfers
from patrickstar_v043.simulation import (
    BATCHES,
    CHUNK_NUMELS,
    best_step,
    chunk_count,
    device_bytes,
    search_chunk_numel,
    simulate_original,
)
from published import BEYOND, CONSTANTS, HELD_OUT_RUNS, VOCAB, errors_of, points

from patrickstar._layout.chunk_mapping import ParamSpec, build_layout
from patrickstar._layout.schema import schema_for
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar.errors import BudgetError, ConfigError

quick = settings(derandomize=True, deadline=None, max_examples=60)

NODE = find_machine("8xV100-32GB")
POINTS = [(point.gpt, point.gpus) for point in points()]

cases = st.tuples(st.sampled_from(POINTS), st.sampled_from(BATCHES)).map(lambda drawn: (*drawn[0], drawn[1]))
"""Shape, GPUs and batch."""
more = st.floats(1, 4)


def changed(part, field, factor):
    """Return the node with one value multiplied."""
    old = getattr(NODE, part)
    value = getattr(old, field)
    new = old.model_copy(update={field: type(value)(value * factor)})
    return NODE.model_copy(update={part: new})


def simulated(gpt, gpus, batch, machine=NODE):
    """Simulate a step; return None if it does not fit."""
    try:
        return simulate_original(gpt, machine, gpus, batch, search_chunk_numel(gpt, NODE.gpu, gpus))
    except BudgetError:
        return None


def fitting(case):
    """Simulate a step that fits."""
    step = simulated(*case)
    assume(step is not None)
    return step


# Published results


def test_published_throughputs_with_one_set_of_constants():
    errors = errors_of(NODE)
    assert len(errors) == 16
    assert sum(abs(error) <= 0.1 for error in errors) >= 13, errors
    assert max(map(abs, errors)) <= 0.2, errors


def test_runs_on_held_out_machines():
    for run in HELD_OUT_RUNS:
        step = best_step(run.gpt, find_machine(run.machine), 1, batches=(run.batch,))
        assert isclose(step.tflops, run.tflops, rel_tol=0.1)


def test_the_largest_published_models_fit_and_the_next_larger_ones_do_not():
    fifteen, eighteen = (Gpt(layers, 4096, 16, VOCAB, head=False) for layers in (78, 90))
    with pytest.raises(BudgetError, match="too little memory") as refusal:
        best_step(fifteen, NODE, 1)
    assert refusal.value.short_bytes is not None and refusal.value.short_bytes > 0
    assert best_step(eighteen, NODE, 8).tflops > 0
    with pytest.raises(BudgetError, match="a group of 8 chunks"):
        best_step(BEYOND["20B"], NODE, 8)


def test_an_invalid_number_of_gpus_raises():
    with pytest.raises(ConfigError, match="16 GPUs were requested, but 8xV100-32GB has 8"):
        best_step(POINTS[0][0], NODE, 16)
    with pytest.raises(ConfigError, match="0 GPUs"):
        best_step(POINTS[0][0], NODE, 0)


# Counts


def test_saved_bytes_and_operations_are_those_published():
    # Korthikanti et al. 2022, equation 1, with GPT-3's numbers: s b h (34 + 5 a s / h).
    gpt = Gpt(96, 12_288, 96, sequence=2048)
    assert saved_bytes(gpt, 1) == 2048 * 12_288 * (34 + 5 * 96 * 2048 // 12_288)
    large = Gpt(layers=100, hidden=16_384, heads=64, head=False)
    assert isclose(paper_operations(large, 1000), large.operations(1000), rel_tol=0.02), "matrices dominate"


@quick
@given(st.builds(Gpt, st.integers(1, 100), st.integers(1, 64).map(lambda n: 64 * n), st.integers(1, 32)))
def test_layer_parameters_are_the_sum_of_its_tensors(gpt):
    assert sum(layer_tensors(gpt)) == gpt.layer_numel
    assert gpt.numel == gpt.layers * gpt.layer_numel + embedding_numel(gpt) + 2 * gpt.hidden


# Consistency


@quick
@given(cases)
def test_a_step_is_the_sum_of_its_channels(case):
    gpt, gpus, batch = case
    step = fitting(case)
    seconds = [getattr(step.channels, field.name) for field in fields(step.channels)]
    assert min(seconds) >= 0
    assert isclose(sum(seconds), step.channels.total_s)
    tokens = gpus * batch * gpt.sequence
    assert isclose(step.tflops * 1e12 * step.channels.total_s, paper_operations(gpt, tokens))


@quick
@given(cases)
def test_collectives_send_six_bytes_per_parameter_except_the_own_shard(case):
    gpt, gpus, _ = case
    step = fitting(case)
    padded = gpus * step.placement.chunks * step.placement.chunk_numel
    sent = step.channels.collectives_s * NODE.links.gpu_gpu
    assert isclose(sent, 6 * (gpus - 1) / gpus * padded)
    assert padded >= gpt.layers * gpt.layer_numel


@quick
@given(cases)
def test_the_placement_fits(case):
    gpt, gpus, batch = case
    placed = fitting(case).placement
    numel = placed.chunk_numel
    # 14 bytes per parameter: 2 for param16, 12 for the optimizer's lists.
    on_device = (placed.in_margin + placed.forced) * 12 * numel
    peak = max(non_model_bytes(gpt, batch, placed.chunks))
    assert on_device + 2 * numel + peak <= device_bytes(NODE.gpu)
    assert (placed.chunks - placed.in_margin - placed.forced) * 12 * numel <= NODE.host.memory * 8 // 10 // gpus
    assert 0 <= placed.device_grads <= len(placed.on_host) == placed.chunks - placed.in_margin
    assert not placed.in_margin or placed.transfers.fetched == placed.transfers.evicted == 0


@quick
@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([128, 512, 2048]))
def test_the_chunk_count_equals_that_of_the_layout(layers, size, hidden):
    gpt = Gpt(layers, hidden, 8)
    numel = size * 4 * hidden**2
    schema = schema_for("float16", trained=True)
    tensors = layer_tensors(gpt) * layers
    params = [ParamSpec(str(index), count, schema) for index, count in enumerate(tensors)]
    assert chunk_count(gpt, numel) == build_layout(params, numel).chunk_count


def test_no_smaller_chunk_size_wastes_less():
    for gpt, gpus in POINTS:
        found = search_chunk_numel(gpt, NODE.gpu, gpus)
        used = found * -(-chunk_count(gpt, found) // gpus)
        for numel in CHUNK_NUMELS:
            if numel >= max(layer_tensors(gpt)) and numel <= found:
                assert used <= numel * -(-chunk_count(gpt, numel) // gpus)
        assert gpus * used < 1.25 * gpt.layers * gpt.layer_numel


# Monotonicity


RATES = [constant for constant in CONSTANTS if constant != ("gpu", "half_rate_size")]


@quick
@given(cases, st.sampled_from([*RATES, ("host", "cores")]), more)
def test_faster_hardware_is_never_slower(case, resource, factor):
    before, after = simulated(*case), simulated(*case, changed(*resource, factor))
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.channels.total_s <= before.channels.total_s * (1 + 1e-9)


@quick
@given(cases, st.sampled_from([("host", "memory"), ("gpu", "memory")]), more)
def test_a_fitting_step_fits_with_more_memory_and_with_a_smaller_batch(case, resource, factor):
    gpt, gpus, batch = case
    assert fitting(case)
    assert simulated(*case, changed(*resource, factor)) is not None
    assert all(simulated(gpt, gpus, smaller) is not None for smaller in BATCHES if smaller < batch)


def test_optimizer_chunks_are_forced_onto_gpus_if_the_host_is_full():
    fifteen, half = Gpt(78, 4096, 16, VOCAB, head=False), find_machine("8xV100-32GB-120GB")
    step = best_step(fifteen, half, 8)
    assert step.placement.forced > 0
    assert step.tflops < best_step(fifteen, NODE, 8).tflops


# Activation curve: non-model data over a step, and the transfers that it causes


@quick
@given(st.integers(1, 40), st.integers(1, 50))
def test_chunks_that_do_not_fit_are_fetched_and_evicted_twice(chunks, capacity):
    transfers = simulate_transfers([capacity] * (2 * chunks), chunks)
    assert transfers.fetched == transfers.evicted == 2 * max(0, chunks - capacity)
    # After backward the first chunks are held: they are used next.
    assert transfers.held == frozenset(range(min(chunks, capacity)))


@quick
@given(st.lists(st.integers(1, 10), min_size=2, max_size=20).filter(lambda capacities: len(capacities) % 2 == 0))
def test_fetches_equal_evictions(capacities):
    transfers = simulate_transfers(capacities, len(capacities) // 2)
    assert transfers.fetched == transfers.evicted
    assert len(transfers.held) <= capacities[-1]


def test_non_model_data_grows_in_forward_and_shrinks_in_backward():
    gpt = Gpt(20, 2048, 16, head=False)
    curve = non_model_bytes(gpt, 16, 10)
    assert curve[:10] == sorted(curve[:10]) and curve[10:] == sorted(curve[10:], reverse=True)
    assert curve[10] - curve[-1] == gpt.checkpoint_bytes(16) - checkpoint_bytes(gpt, 16, 2)


def test_logits_count_between_forward_and_backward_if_larger_than_a_layer():
    with_head, without = (Gpt(2, 256, 4, vocab=500_000, head=head) for head in (True, False))
    high, low = non_model_bytes(with_head, 4, 5), non_model_bytes(without, 4, 5)
    assert high[5] == with_head.checkpoint_bytes(4) + with_head.logit_bytes(4) > low[5]
    assert high[:5] + high[6:] == low[:5] + low[6:]
