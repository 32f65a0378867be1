"""Search of a plan: which steps the engine runs before one is planned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._perf_model.machine_parts import machine_of_parts
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.workload import PRODUCTS_ONLY, RECOMPUTED, of_shares, offloading
from patrickstar._plan.planned_model import PlannedModel
from patrickstar._plan.search import OFFLOADED, Search
from patrickstar.errors import BudgetError

DECODER = OPEN_MODELS["llama-3.2-1b"].decoder()
SEQUENCE = 2048


def whole(batch, checkpointing, mesh):
    return DECODER.workload(batch, SEQUENCE, checkpointing, None)


workload = of_shares(whole)


def searched(step_s, memory, checkpointing=RECOMPUTED):
    """Return the share that is planned, and those that were run: in `step_s`, or refused if they have no time."""
    ran = []

    def dry_run(machine, best):
        work = best.workload
        share = (work.checkpointing, work.offloaded) if work.offloaded else work.checkpointing
        ran.append(share)
        if share not in step_s:
            raise BudgetError("the engine has no room", 1)
        return SimpleNamespace(seconds=step_s[share])

    machine = machine_of_parts("rtx4090", host_memory="64GB")
    machine = machine.model_copy(update={"gpu": machine.gpu.model_copy(update={"memory": memory})})
    traced = SimpleNamespace(dry_run=dry_run)
    model = PlannedModel("llama", SEQUENCE, workload, lambda: traced)
    search = Search(machine, Mesh(), checkpointing, (4,), dry_run=True)
    best, _ = search._verified(model, Mesh())
    return best.workload.checkpointing, ran


def between(less, more):
    """Return memory in which a step fits that recomputes one share of the layers, but none with another share."""
    first, second = (workload(4, share, Mesh()).device_bytes for share in (less, more))
    return (first + second) // 2 + (2 << 30)


WITH_OFFLOAD = (0.25, OFFLOADED)


@pytest.mark.parametrize(
    ("step_s", "planned", "ran"),
    [
        ({1.0: 3.0, 0.5: 2.5}, 0.5, [1.0, 0.5, WITH_OFFLOAD]),
        ({1.0: 3.0, 0.5: 2.5, WITH_OFFLOAD: 2.0}, 0.25, [1.0, 0.5, WITH_OFFLOAD]),
        ({1.0: 3.0, 0.5: 3.5}, 1.0, [1.0, 0.5]),
        ({1.0: 3.0}, 1.0, [1.0, 0.5, 0.75]),
    ],
)
def test_a_share_is_planned_if_its_dry_run_is_faster(step_s, planned, ran):
    assert searched(step_s, between(0.5, PRODUCTS_ONLY)) == (planned, ran)


def test_a_share_is_tried_beside_products_alone():
    step_s = {PRODUCTS_ONLY: 2.0, 0.5: 1.5, 1.0: 3.0}
    assert searched(step_s, between(PRODUCTS_ONLY, 0.0)) == (0.5, [PRODUCTS_ONLY, 1.0, 0.5, WITH_OFFLOAD])


def test_a_larger_batch_that_recomputes_all_layers_is_planned_if_its_tokens_are_faster():
    """The estimate prefers two sequences that are stored; the engine runs eight in less than four times their time."""
    step_s, ran = {0.0: 2.0, 1.0: 7.0}, []

    def dry_run(machine, best):
        ran.append((best.workload.batch, best.workload.checkpointing))
        return SimpleNamespace(seconds=step_s.get(best.workload.checkpointing, 9.0))

    stored, recomputed = workload(8, 0.0, Mesh()).device_bytes, workload(8, 1.0, Mesh()).device_bytes
    machine = machine_of_parts("rtx4090", host_memory="64GB")
    memory = machine.gpu.model_copy(update={"memory": (stored + recomputed) // 2 + (2 << 30)})
    model = PlannedModel("llama", SEQUENCE, workload, lambda: SimpleNamespace(dry_run=dry_run))
    search = Search(machine.model_copy(update={"gpu": memory}), Mesh(), (1.0, 0.0), (2, 8), dry_run=True)
    found, _ = search._verified(model, Mesh())
    assert (found.workload.batch, ran[:2]) == (8, [(2, 0.0), (8, 1.0)])


def test_what_is_offloaded_takes_no_memory_on_the_device():
    stored, offloaded = (works(4, 0.25, Mesh()) for works in (workload, offloading(workload, 1.0)))
    assert offloaded.device_bytes == workload(4, 1.0, Mesh()).device_bytes < stored.device_bytes
    assert replace(offloaded, offloaded=0.0, non_model_bytes=stored.non_model_bytes) == stored


def test_a_share_that_is_given_is_run_alone():
    assert searched({0.25: 1.0}, 80 << 30, (0.25,)) == (0.25, [0.25])


def test_no_share_is_tried_if_everything_is_stored():
    share, ran = searched({0.0: 1.0, 1.0: 2.0}, 80 << 30)
    assert (share, ran) == (0.0, [0.0])


def test_a_refused_step_is_replaced_by_one_that_needs_less_memory():
    share, ran = searched({1.0: 2.0, 0.5: 3.0}, 80 << 30)
    assert (share, ran) == (1.0, [0.0, PRODUCTS_ONLY, 1.0, 0.5])


def test_shares_lie_between_products_and_all():
    none, half, every = (workload(4, share, Mesh()) for share in (PRODUCTS_ONLY, 0.5, 1.0))
    assert workload(4, 0.0, Mesh()) == whole(4, False, Mesh()) and every == whole(4, True, Mesh())
    assert none.device_bytes == whole(4, "products", Mesh()).device_bytes
    for name in ("operations", "device_bytes"):
        low, middle, high = sorted(getattr(each, name) for each in (none, half, every))
        assert getattr(half, name) == middle and low < middle < high
        assert abs(2 * middle - low - high) <= 2
