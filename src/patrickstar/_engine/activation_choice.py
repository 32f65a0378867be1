"""Choice of what a step does with its activations, by dry runs with the inputs of the first forward."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from patrickstar._autograd.activation_offload import ActivationOffload
from patrickstar._autograd.recomputed_layers import Activations, layers_of, recompute
from patrickstar._dry_run.fit_check import default_loss
from patrickstar._dry_run.measured_machine import MeasuredMachine
from patrickstar._dry_run.simulation import dry_run_engine, forward_backward_step
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine_plan import on_first_process
from patrickstar.errors import BudgetError, ConfigError, DiskError

_log = logging.getLogger(__name__)


CHOICES = (
    Activations(0.0, 0.0),
    Activations(0.0, 0.4),
    Activations(0.0, 1.0),
    Activations("products", 0.0),
    Activations(0.25, 0.4),
    Activations(0.5, 0.0),
    Activations(1.0, 0.0),
    Activations(1.0, 1.0),
)
"""What is tried, in the order of the computation that it adds; the last one takes the least device memory."""

WITHOUT_LAYERS = tuple(each._replace(activation_checkpointing=None) for each in CHOICES if not each[0])
"""What is tried with models that have no layers of transformers."""


def choose_activations(engine: Any, core: EngineCore, args: Any, kwargs: Any) -> None:
    """Replace `activation_checkpointing="auto"` by the fastest of `CHOICES` for a forward with these arguments.

    All of several processes must call this together. If no dry run fits, or the model's code can't be dry-run, the last
    of the choices is used, and the step finds out whether it fits.

    Raises:
        ConfigError: Parameters are DTensors, whose operators communicate and can't be dry-run.
    """
    if core.distribution.linked is not None:
        raise ConfigError(
            "activation_checkpointing='auto' can't simulate operators that communicate, as those of DTensors do: name "
            "a share of the layers, or 'products'"
        )
    choices = CHOICES if layers_of(core.module) else WITHOUT_LAYERS
    chosen, reason = on_first_process(core, lambda: _fastest(engine, core, choices, args, kwargs))
    core.config = core.config.model_copy(update=chosen._asdict())
    if chosen.activation_checkpointing is not None:
        recompute(core.module, chosen.activation_checkpointing, core.module_hooks, caches=False)
    if chosen.activation_offload:
        core.activation_offload = ActivationOffload(core.manager, chosen.activation_offload)
    if not core.world.rank:
        _log.info("activations: %s, %s", chosen, reason)


def _fastest(
    engine: Any, core: EngineCore, choices: Sequence[Activations], args: Any, kwargs: Any
) -> tuple[Activations, str]:
    """Return the choice with the fastest dry run, and why it was chosen."""
    step = forward_backward_step(default_loss, args, kwargs)
    disk = core.config.disk
    measured = MeasuredMachine.of(core.device, disk.directory if disk is not None else None)
    fitting: dict[Activations, float] = {}
    least_s = 0.0
    for choice in choices:
        if fitting and min(fitting.values()) <= least_s:
            break  # what follows computes no less
        try:
            report = dry_run_engine(engine, step, choice._asdict(), measured)
        except BudgetError:
            continue
        except (ConfigError, DiskError):
            raise
        except Exception as error:  # the model's own code, which may do anything
            reason = f"which takes the least memory, as the dry run can't run the model's code: {error}"
            warnings.warn(f"activation_checkpointing='auto' has become {choices[-1]}, {reason}", stacklevel=5)
            return choices[-1], reason
        fitting[choice], least_s = report.seconds, report.compute_s
    if not fitting:
        return choices[-1], "which takes the least memory: none fits in dry runs"
    chosen = min(fitting, key=fitting.__getitem__)
    return chosen, f"the fastest of {len(fitting)} that fit in dry runs, {fitting[chosen]:.3g} s per step"
