"""Formulas of open decoders come to what their traces count."""

import warnings
from dataclasses import replace

import pytest

from patrickstar._models.model_source import ModelSource
from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._models.vocabulary import Vocabulary
from patrickstar._perf_model.adapters import Adapters
from patrickstar._perf_model.machine_parts import machine_of_parts
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.tiling import Tiling
from patrickstar._perf_model.workload import Workload
from patrickstar._plan.planned_model import find_planned_model
from patrickstar._plan.traced_model import TracedModel, language_model

MACHINE = machine_of_parts("rtx4090")
LORA, QLORA = Adapters(16), Adapters(8, quantized=True)


def compute_s(work: Workload) -> float:
    """Return the seconds of a step's operators, as estimates have them."""
    products_s = (work.operations - work.thin_operations) / MACHINE.matmul_rate(work.matrix_size)
    return products_s + work.other_bytes / MACHINE.gpu.memory_bandwidth


@pytest.mark.parametrize("name", OPEN_MODELS)
def test_parameters_are_those_published(name):
    assert OPEN_MODELS[name].decoder().numel == OPEN_MODELS[name].params


@pytest.mark.long("five traces of models of transformers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "adapters", "checkpointing"),
    [
        ("llama-3.2-1b", None, True),
        ("llama-3.2-1b", None, "products"),
        pytest.param("llama-3.2-1b", LORA, "products", marks=pytest.mark.slow),
        pytest.param("qwen3-0.6b", QLORA, "products", marks=pytest.mark.slow),
        pytest.param("llama-3-8b", None, False, marks=pytest.mark.slow),
        pytest.param("llama-3.2-1b", LORA, False, marks=pytest.mark.slow),
        ("qwen2.5-0.5b", LORA, True),
        pytest.param("qwen3-0.6b", None, False, marks=pytest.mark.slow),
        ("qwen3-0.6b", QLORA, False),
        pytest.param("phi-3-mini", QLORA, True, marks=pytest.mark.slow),
        pytest.param("gemma-2-2b", LORA, True, marks=pytest.mark.slow),
    ],
)
def test_a_formula_is_the_trace(name, adapters, checkpointing):
    model = replace(OPEN_MODELS[name], layers=2)
    config = model.config()
    config.use_cache = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        source = ModelSource(name, config, Vocabulary(model.vocab))
        traced = language_model(source, 512, adapters).workloads(MACHINE)(2, checkpointing)
    counted = model.decoder().workload(2, 512, checkpointing, adapters)
    for field in ("params", "frozen_params", "frozen_bytes", "param_bytes", "tokens"):
        assert getattr(counted, field) == getattr(traced, field), field
    # The gradient of the first layer's input is not needed, if the embedding is frozen.
    assert counted.operations == pytest.approx(traced.operations, rel=0.035)
    assert counted.non_model_bytes == pytest.approx(traced.non_model_bytes, rel=0.05)
    assert counted.device_bytes == pytest.approx(traced.device_bytes, rel=0.1)
    assert traced.device_bytes <= traced.non_model_bytes + traced.working_bytes
    assert compute_s(counted) == pytest.approx(compute_s(traced), rel=0.12)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_plans_of_open_models_on_gpus_trace_nothing(monkeypatch):
    """But for tiled losses, which formulas do not have."""
    monkeypatch.setattr(TracedModel, "workloads", lambda *args: pytest.fail("a trace"))
    plan = find_planned_model("llama-3.2-1b", 512, MACHINE, None)
    decoder = OPEN_MODELS["llama-3.2-1b"].decoder()
    assert plan.workload(2, 1.0, Mesh()) == decoder.workload(2, 512, True, None)
    with pytest.raises(pytest.fail.Exception, match="a trace"):
        find_planned_model("llama-3.2-1b", 512, MACHINE, None, tiling=Tiling(tiled_loss=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tiles_of_the_loss_have_the_operations_of_all_logits():
    """Its products are in place or have an output of their own."""
    model = replace(OPEN_MODELS["qwen2.5-0.5b"], layers=1)
    source = ModelSource("qwen2.5-0.5b", model.config(), Vocabulary(model.vocab))
    whole, tiled = (
        language_model(source, 256, tiling=Tiling(tiled_loss)).workloads(MACHINE)(8, False)
        for tiled_loss in (False, True)
    )
    assert tiled.operations == whole.operations and tiled.non_model_bytes < whole.non_model_bytes
