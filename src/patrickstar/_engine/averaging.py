"""Evaluation of the average of the parameters that an optimizer keeps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from patrickstar._engine.core import EngineCore
from patrickstar._hardware.sigint_gate import uninterruptible
from patrickstar._kernels.update_rule import interpolate_
from patrickstar._layout.schema import EMA
from patrickstar._params.managed_param import ManagedParam
from patrickstar.errors import ConfigError, TrainingError


@contextmanager
def averaged(core: EngineCore, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> Iterator[None]:
    """Replace parameters by their averages, one parameter at a time, until the end of the context.

    A moving average is exchanged for the parameter. That of a schedule-free optimizer is computed from a state, and the
    parameter again from it, as `schedulefree` does in `eval()` and `train()`.

    Args:
        groups: Param group of each parameter that is in one.

    Raises:
        ConfigError: The optimizer keeps no average.
        TrainingError: An iteration is open, since its gradients belong to the parameters.
    """
    optimizer = core.config.optimizer
    weights = {managed: optimizer.average_weights(group) for managed, group in groups.items()}
    if EMA not in optimizer.states and not any(weights.values()):
        raise ConfigError(
            "the optimizer keeps no average: use ps.Config(optimizer=ps.EMA(ps.AdamW(...), decay=0.999)), or "
            "ps.ScheduleFreeAdamW"
        )
    if core.averaged:
        raise TrainingError("the parameters are the averages already: engine.averaged() can't be nested")
    core.complete()
    core.flush()
    if any(managed.state.has_any_gradient for managed in core.shards.managed_params):
        raise TrainingError(
            "engine.averaged() needs a step without stored gradients: call optimizer.step() or zero_grad() first"
        )
    updated = [managed for managed in core.shards.managed_params if managed.schema.trained and managed.steps]
    replaced: list[ManagedParam] = []
    core.averaged = True
    try:
        for managed in updated:
            _replace(core, managed, weights.get(managed), back=False)
            replaced.append(managed)
        yield
    finally:
        if not core.closed:
            for managed in replaced:
                _replace(core, managed, weights.get(managed), back=True)
        core.averaged = False


def _replace(core: EngineCore, managed: ManagedParam, weights: tuple[str, float, float] | None, *, back: bool) -> None:
    state, *fractions = weights or (EMA,)
    with uninterruptible(), core.close_on_data_loss():
        param, other = (core.full_state.read(managed, kind) for kind in (managed.full_kind, state))
        if fractions:
            core.full_state.write(managed, managed.full_kind, interpolate_(param, other, fractions[back]))
            return
        if EMA not in managed.state_kinds:
            return
        core.full_state.write(managed, managed.full_kind, other)
        core.full_state.write(managed, EMA, param)
