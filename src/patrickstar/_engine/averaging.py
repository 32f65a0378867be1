"""Evaluation of the moving average of the parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

from patrickstar._engine.core import EngineCore
from patrickstar._layout.schema import EMA
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.managed_param import ManagedParam
from patrickstar.errors import ConfigError, TrainingError


@contextmanager
def averaged(core: EngineCore) -> Iterator[None]:
    """Exchange parameters and averages, one parameter at a time, until the end of the context.

    Raises:
        ConfigError: The optimizer keeps no average.
        TrainingError: An iteration is open, since its gradients belong to the parameters.
    """
    if EMA not in core.config.optimizer.states:
        raise ConfigError("the optimizer keeps no average: use ps.Config(optimizer=ps.EMA(ps.AdamW(...), decay=0.999))")
    if core.averaged:
        raise TrainingError("the parameters are the averages already: engine.averaged() can't be nested")
    core.complete()
    core.flush()
    if any(managed.state.has_any_gradient for managed in core.data.managed_params):
        raise TrainingError(
            "engine.averaged() needs a step without stored gradients: call optimizer.step() or zero_grad() first"
        )
    updated = [managed for managed in core.data.managed_params if managed.schema.trained and managed.steps]
    exchanged: list[ManagedParam] = []
    core.averaged = True
    try:
        for managed in updated:
            _exchange(core, managed)
            exchanged.append(managed)
        yield
    finally:
        if core.release.alive:
            for managed in exchanged:
                _exchange(core, managed)
        core.averaged = False


@defer_sigint
def _exchange(core: EngineCore, managed: ManagedParam) -> None:
    with core.close_on_data_loss():
        param, average = (core.full_state.read(managed, kind) for kind in (managed.full_kind, EMA))
        core.full_state.write(managed, managed.full_kind, average)
        core.full_state.write(managed, EMA, param)
