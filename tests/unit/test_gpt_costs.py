"""Analytic GPT costs against published counts and against sums over parameters."""

from math import isclose

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._models.presets import Preset
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.workload import shape_workload
from patrickstar._plan.planned_model import _traced_preset

given = fixed_draws(100)

shapes = st.builds(
    Gpt,
    layers=st.integers(1, 100),
    hidden=st.integers(1, 64).map(lambda n: 64 * n),
    heads=st.integers(1, 32),
    vocab=st.integers(1, 60_000),
    sequence=st.integers(1, 4096),
    head=st.booleans(),
)


def test_parameters_are_those_published():
    assert Gpt(layers=12, hidden=768, heads=12).numel == 124_439_808, "those of GPT-2's checkpoint"
    # Tencent/PatrickStar, issue 67: 0.72940493e9, of which 2.4e6 are a pooler and an output layer that a GPT lacks.
    assert isclose(Gpt(24, 1536, 16, vocab=30_522, sequence=128, head=False).numel, 0.72940493e9, rel_tol=0.005)


@given(shapes, st.integers(1, 1 << 20))
def test_operations_are_two_per_matrix_element_and_token(gpt, tokens):
    matrices = 12 * gpt.hidden**2
    scores_and_sums = 2 * 2 * gpt.sequence * gpt.hidden
    forward = gpt.layers * (2 * matrices + scores_and_sums)
    logits = 2 * gpt.vocab * gpt.hidden if gpt.head else 0
    assert gpt.operations(tokens, recompute=False) == 3 * tokens * (forward + logits)
    assert gpt.operations(tokens) == gpt.operations(tokens, recompute=False) + tokens * forward


@given(shapes, st.integers(1, 64))
def test_activations_are_proportional_to_the_batch(gpt, batch):
    assert gpt.checkpoint_bytes(batch) == batch * gpt.checkpoint_bytes(1)
    assert gpt.logit_bytes(batch) == batch * gpt.logit_bytes(1)
    assert (gpt.logit_bytes(batch) > 0) == gpt.head


@pytest.mark.parametrize(("batch", "checkpointing"), [(1, False), (4, True), (4, "products")])
def test_formulas_of_time_are_the_trace(batch, checkpointing):
    preset, machine = Preset(2, 1024, heads=16, vocab=5000, sequence=512), find_machine("8xV100-32GB")
    traced = _traced_preset("a GPT", preset).workloads(machine)(batch, checkpointing)
    counted = shape_workload(preset, batch, checkpointing)
    assert counted.other_bytes == pytest.approx(traced.other_bytes, rel=0.05)
    # Attention's backward recomputes its scores; nothing needs the last product of a layer again.
    assert counted.operations == pytest.approx(traced.operations, rel=0.08)
