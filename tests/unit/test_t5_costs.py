"""Analytic T5 costs against published counts, against sums over matrices, and in plans."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._models.presets import MOE_PRESETS, T5_PRESETS
from patrickstar._perf_model.gpt_costs import SAVED_BYTES_PER_HIDDEN, Gpt
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import shape_workload

given = fixed_draws(100)

shapes = st.builds(
    T5,
    layers=st.integers(1, 100),
    hidden=st.integers(1, 64).map(lambda n: 64 * n),
    heads=st.integers(1, 32),
    ffn=st.integers(1, 256).map(lambda n: 64 * n),
    vocab=st.integers(1, 60_000),
    sequence=st.integers(1, 4096),
)


@pytest.mark.parametrize(
    ("name", "numel"), [("t5-60m", 60_506_624), ("t5-220m", 222_903_552), ("t5-770m", 737_668_096)]
)
def test_small_base_and_large_have_as_many_parameters_as_their_checkpoints(name, numel):
    assert T5_PRESETS[name].numel == numel


@given(shapes, st.integers(1, 1 << 20))
def test_operations_are_two_per_matrix_element_and_token(t5, tokens):
    norms = 2 * t5.hidden, 3 * t5.hidden
    encoder, decoder = (t5.layer_part(1) - 4 * t5.hidden**2 - t5.hidden) - norms[0], t5.layer_part(1) - norms[1]
    # Self-attention of both stacks and cross attention, each with scores and weighted sums.
    scores_and_sums = 3 * 2 * 2 * t5.sequence * t5.hidden
    forward = t5.layers * (2 * (encoder + decoder) + scores_and_sums)
    logits = 2 * t5.vocab * t5.hidden
    assert t5.operations(tokens, recompute=False) == 3 * tokens * (forward + logits)
    assert t5.operations(tokens) == t5.operations(tokens, recompute=False) + tokens * forward


@given(shapes, st.integers(1, 64))
def test_activations_are_proportional_to_the_batch(t5, batch):
    assert t5.checkpoint_bytes(batch) == batch * t5.checkpoint_bytes(1)
    assert t5.logit_bytes(batch) == batch * t5.logit_bytes(1)
    encoder, decoder = t5.saved_bytes(1)
    assert t5.saved_bytes(batch) == (batch * encoder, batch * decoder)
    assert encoder < decoder


@given(shapes, st.integers(1, 64))
def test_checkpointing_costs_operations_and_saves_memory(t5, batch):
    stored, recomputed = shape_workload(t5, batch, checkpointing=False), shape_workload(t5, batch)
    assert recomputed.operations > stored.operations
    assert recomputed.params == stored.params == t5.numel
    assert recomputed.tokens == batch * t5.sequence
    assert t5.layers == 1 or recomputed.non_model_bytes < stored.non_model_bytes


def test_a_pair_of_layers_costs_as_much_as_the_same_matrices_in_a_gpt_but_for_the_input_of_its_activation():
    # 3 attentions and 2 feed-forward networks: 28 x hidden^2 elements, those of 7 / 3 layers of a GPT.
    t5 = T5(layers=30, hidden=4096, heads=32, ffn=16384, vocab=1, sequence=1)
    gpt = Gpt(layers=70, hidden=4096, heads=32, vocab=1, sequence=1)
    assert t5.operations(1000) == pytest.approx(gpt.operations(1000), rel=1e-3)
    assert t5.numel == pytest.approx(gpt.numel, rel=1e-3)
    # An encoder layer saves less, as ReLU does not save its input: GELU does, 4 x hidden x 2 bytes.
    t5 = T5(12, 1024, 16, 4096, sequence=512)
    assert 512 * 1024 * SAVED_BYTES_PER_HIDDEN - t5.saved_bytes(1)[0] == 512 * 4096 * 2


@pytest.mark.parametrize(
    ("name", "printed", "billions"),
    [
        ("t5-1.4b", (16, 16, 1024, 16384), 1.28),
        ("t5-27b", (28, 64, 4096, 16384), 13.2),  # the table contradicts the name: 57 layers would have 27
        ("t5-58b", (60, 64, 4096, 16384), 28.2),  # as above: 123 layers would have 58
        ("t5-moe-1.2t", (16, 16, 1024, 16384), 1238),
    ],
)
def test_angel_ptms_presets_are_as_its_table_4_prints_them(name, printed, billions):
    t5 = (T5_PRESETS | MOE_PRESETS)[name]
    assert (t5.layers, t5.heads, t5.hidden, t5.ffn) == printed
    assert replace(t5, vocab=0).numel / 1e9 == pytest.approx(billions, rel=0.005)
    assert name != "t5-moe-1.2t" or t5.experts.count == 2304
