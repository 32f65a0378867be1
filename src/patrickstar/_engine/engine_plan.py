"""Predictions of training steps by dry runs with an engine's model, budgets and processes."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import dry_run_engine, forward_backward_step
from patrickstar._engine.core import EngineCore
from patrickstar._engine.recording import Recording
from patrickstar._schedule.coordination import Request
from patrickstar.errors import ConfigError, PatrickStarError

T = TypeVar("T")


def plan_step(
    engine: Any, core: EngineCore, loss: Callable[[Any], torch.Tensor] | None, args: Any, kwargs: Any
) -> DryRunReport:
    """Dry-run a step; see `Engine.plan`. The first of several processes runs it for all, while they wait."""
    if core.distribution.linked is not None:
        raise ConfigError(
            "engine.plan can't simulate operators that communicate, as those of DTensors do: use patrickstar plan"
        )
    step = forward_backward_step(loss, args, kwargs, core.gradients.last_clips)
    report = on_first_process(core, lambda: dry_run_engine(engine, step))
    if isinstance(core.recording, Recording):
        core.recording.planned(report.seconds, report.bound_s, report.stats)
    return report


def on_first_process(core: EngineCore, measure: Callable[[], T]) -> T:
    """Return what the first process measures while the others wait, on all of them; raise its error on all."""
    world = core.world
    if not core.closed:
        core.sharing.synchronize_processes(Request.PLAN)
        with core.interceptor.lock, core.internal_computation():
            core.optimizer_step.updates.finish_running()  # beside updates all that is measured is slower
    own: Any = None
    failed: Exception | None = None
    if not world.rank:
        try:
            own = measure()
        except Exception as error:  # the others wait to learn of it
            failed = error
    if (failed := world.agree_on_error(failed, PatrickStarError)) is not None:
        raise failed
    found: T = world.from_first(own)
    return found
