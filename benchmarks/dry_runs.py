"""Dry runs of language models on machine specs, with recomputation of activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from steps import checkpointed, train_step
from torch import nn

import patrickstar as ps
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import simulate
from patrickstar._models.model_source import find_model
from patrickstar._perf_model.machine_spec import Machine, find_machine


def builder_of(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds a model with activation checkpointing."""
    build, _ = find_model(name).open()
    assert not isinstance(build, nn.Module)
    return lambda: checkpointed(build())


def without_disk(machine: str) -> Machine:
    """Return a machine spec without the disk."""
    return find_machine(machine).model_copy(update={"disk": None})


def dry_run(
    build: Callable[[], nn.Module], machine: Machine, batch: int, sequence: int, clipped: bool = True, **more: Any
) -> DryRunReport:
    """Dry-run a step of `batch` sequences.

    Args:
        build: Function that builds the model.
        machine: Machine spec.
        batch: Sequences of a step.
        sequence: Tokens of a sequence.
        clipped: Clip the gradients; otherwise parameters are updated in backward.
        more: Values of the configuration, and `speculates` of the simulation.
    """
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    options = {name: more.pop(name) for name in ("speculates",) if name in more}
    step = partial(train_step, ids=ids, **({"max_norm": 1.0} if clipped else {"update": True}))
    return simulate(ps.Engine, build, ps.Config(device="cpu", **more), step, machine, **options)


def host_update_s(report: DryRunReport) -> float:
    """Return the seconds of a step in which updates run on the host."""
    return next(used.busy_s for used in report.channels if used.name == "update on the host")
