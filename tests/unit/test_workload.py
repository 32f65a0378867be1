"""Workloads of presets: divided by tensor parallelism, with and without experts."""

from dataclasses import replace

import pytest

from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._models.presets import MOE_PRESETS, PRESETS, T5_PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.workload import on_lines, shape_workload, with_products


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_processes_divide_work_and_parameters(tp):
    mesh = Mesh(gpus=8, tp=tp)
    for shape, workload in ((PRESETS["gpt-12b"], shape_workload), (T5_PRESETS["t5-27b"], shape_workload)):
        whole, part = workload(shape, 2, True), workload(shape, 2, True, mesh)
        assert tp * part.operations == pytest.approx(whole.operations)
        vectors = shape.layers * 8 * shape.hidden + (shape.sequence + 2) * shape.hidden
        assert whole.params <= tp * part.params <= whole.params + (tp - 1) * vectors
        assert whole.non_model_bytes / tp <= part.non_model_bytes <= whole.non_model_bytes
        assert part.all_params == whole.params and (tp == 1) is (part == whole)


def test_a_model_with_fewer_layers_than_the_distance_of_experts_is_dense():
    gpt = Gpt(1, 1024, heads=16, experts=Experts(8, every=2))
    dense = replace(gpt, experts=None)
    assert shape_workload(gpt, 1) == shape_workload(dense, 1) and gpt.numel == dense.numel


DECODER = OPEN_MODELS["llama-3-8b"].decoder()


def test_a_model_with_128_experts_has_its_published_size():
    assert MOE_PRESETS["gpt-moe-52b"].numel == pytest.approx(52e9, rel=0.02)
    assert MOE_PRESETS["t5-moe-1.2t"].numel == pytest.approx(1.2e12, rel=0.05)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_memory_between_two_powers_of_two_is_on_a_line(checkpointing):
    asked = []

    def counted(batch, recompute, mesh):
        asked.append(batch)
        return shape_workload(PRESETS["gpt-4b"], batch, recompute, mesh)

    workloads = on_lines(counted)
    for batch in (1, 2, 16):
        assert workloads(batch, checkpointing, Mesh()) == shape_workload(PRESETS["gpt-4b"], batch, checkpointing)
    assert asked == [1, 2, 16]
    for batch in (3, 17, 31):
        found, exact = workloads(batch, checkpointing, Mesh()), shape_workload(PRESETS["gpt-4b"], batch, checkpointing)
        assert found.batch == batch and found.device_bytes == pytest.approx(exact.device_bytes, rel=1e-3)
    assert set(asked) == {1, 2, 4, 16, 32}


def test_products_are_traced_for_one_batch_alone():
    asked = []

    def counted(batch, way):
        asked.append((batch, way))
        return DECODER.workload(batch, 2048, way, None)

    workloads = with_products(counted)
    for batch in (2, 1, 8, 64):
        found, exact = workloads(batch, "products"), DECODER.workload(batch, 2048, "products", None)
        for name in ("operations", "other_bytes", "device_bytes"):
            assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=0.02), name
        assert found.checkpointing == exact.checkpointing
    assert {batch for batch, way in asked if way == "products"} == {2}
