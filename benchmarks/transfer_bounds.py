"""Fewest bytes that any plan transfers, by a linear program."""

import math
from dataclasses import replace

from patrickstar._perf_model.linear_program import value
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.step_program import StepProgram, total
from patrickstar._perf_model.workload import Workload


def min_transfer_bytes(work: Workload, machine: Machine) -> tuple[int, int]:
    """Return lower bounds of the bytes of a step between host and device, and to and from disk, with one process.

    Each bound is minimized separately and assumes no non-model data, because a plan may use the memory that non-model
    data leaves free below its peak. Embedding lookups on the host are not considered. The model has to fit.
    """
    amounts = {channel.name: channel.amount for channel in StepProgram(work, machine, Mesh()).channels()}
    program = StepProgram(replace(work, non_model_bytes=0, working_bytes=0, peak_working_bytes=0), machine, Mesh())
    bounds = []
    for pair in (("host to device", "device to host"), ("disk read", "disk write")):
        transferred = total([amounts.get(name, 0 * program.one) for name in pair])
        solution = program.minimize(transferred / 1e9)
        assert solution is not None, "the model does not fit"
        bounds.append(math.ceil(value(transferred, solution)))
    return bounds[0], bounds[1]
