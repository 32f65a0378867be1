"""Law of estimates: a better part never makes a model slower or refused, and no step beats its parts."""

from functools import cache

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._perf_model.machine_parts import known_gpus, machine_of_parts, parse_disk
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.margins import Margins
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import BATCHES, Estimate, best_estimate
from patrickstar.errors import BudgetError

given = fixed_draws(60)

ROUNDING = 1e-4
"""Of the solver's result, and of speeds that are compared with four digits."""
LARGER = 1.3


@cache
def best(
    model: str, sequence: int, machine: Machine, recompute: tuple[bool, ...] = (True, False), batches=BATCHES
) -> Estimate | None:
    """Return the fastest step of an open model; None if it does not fit."""
    decoder, budgets = OPEN_MODELS[model].decoder(), Margins().budgets(machine)
    try:
        return best_estimate(
            lambda batch, again, _: decoder.workload(batch, sequence, again, None), budgets, Mesh(), recompute, batches
        )
    except BudgetError:
        return None


def better(machine: Machine, part: str) -> Machine:
    """Return a machine with a larger or faster part, or with a fast drive."""
    if part == "drive":
        return machine.model_copy(update={"disk": parse_disk("8TB:14GB/s")})
    owner, field = part.split(".")
    old = getattr(machine, owner)
    value = type(getattr(old, field))(LARGER * getattr(old, field))
    return machine.model_copy(update={owner: old.model_copy(update={field: value})})


@pytest.mark.parametrize(
    "part", ["drive", "host.memory", "host.memory_bandwidth", "gpu.memory", "gpu.matmul_tflops", "links.h2d"]
)
@given(
    st.sampled_from(sorted(OPEN_MODELS)),
    st.sampled_from(sorted(known_gpus())),
    st.sampled_from([8, 16, 32, 64, 128, 256, 512, 1000]),
    st.sampled_from([None, "2TB:7GB/s:5GB/s", "4TB:3GB/s:1GB/s"]),
    st.sampled_from([256, 1024, 2048, 4096]),
)
def test_a_better_part_is_never_worse_and_no_choice_beats_the_best(part, model, gpu, gigabytes, disk, sequence):
    machine = machine_of_parts(gpu, host_memory=f"{gigabytes}GB", disk=disk)
    found, after = best(model, sequence, machine), best(model, sequence, better(machine, part))
    if found is None:
        return
    assert after is not None and after.tokens_per_s >= found.tokens_per_s * (1 - ROUNDING)
    assert found.device_bytes <= machine.gpu.memory and found.host_bytes <= machine.host.memory
    assert found.disk_bytes <= (machine.disk.capacity if machine.disk is not None else 0)
    assert found.tflops <= machine.gpu.matmul_tflops and found.bound_s <= found.seconds
    for choice in (best(model, sequence, machine, batches=(1,)), best(model, sequence, machine, (True,))):
        assert choice is None or choice.tokens_per_s <= found.tokens_per_s * (1 + ROUNDING)
