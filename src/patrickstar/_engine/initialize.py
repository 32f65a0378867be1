"""Creation of an engine, alone or in a process group; refusal of what does not fit, before memory is taken."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar._distributed.process_group import Processes, World
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine import Engine
from patrickstar._engine.param_init import WeightSource
from patrickstar._memory.cpu_allocator import cpu_allocator
from patrickstar._memory.file_backed_tensors import FileBackedTensors
from patrickstar._memory.hardware import Hardware
from patrickstar._step.tier_planning import budgets
from patrickstar.config import Config
from patrickstar.errors import BudgetError, DiskError, ModelError

if TYPE_CHECKING:
    from patrickstar._dry_run.fit_check import FitCheck

_log = logging.getLogger(__name__)

Model = nn.Module | Callable[[], nn.Module]
Sample = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


def initialize(
    model: Model,
    config: Config | None = None,
    weights: WeightSource | None = None,
    *,
    sample: Sample | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> tuple[Engine, ChunkOptimizer]:
    """Create an engine that manages a model, and its optimizer.

    If torchrun started several processes, or the script has called `torch.distributed.init_process_group`, every
    process must call it, and each stores a shard of the model data.

    Args:
        model: Function that builds the module, or the module itself. The function is also called on the meta device,
            where it takes no memory, so that a model that does not fit is refused before it is built.
        config: Budgets, precision and optimizer. Default: `Config()`.
        weights: Returns the value of a parameter by its name, for parameters on the meta device.
        sample: Inputs of the model as in training: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            A training step with them is dry-run before memory is taken, and refused if it does not fit, with settings
            that suffice. Without it, the first step finds out. Ignored with several processes.
        loss: Returns the loss from the model's output, for the dry run. Default: its attribute `loss`, or the output.

    Returns:
        The engine, to be called in place of the model, and the optimizer (`engine.optimizer`).

    Raises:
        BudgetError: The model data, or a training step with `sample`, exceeds the budgets.
        ConfigError: An option is invalid, or the processes differ in model, options or versions.
        DeviceError: The compute device is not available.
        ModelError: A parameter or buffer cannot be managed.
    """
    config = config if config is not None else Config()
    world = World.find(config.find_device())
    on_disk = None
    if world.size == 1 and not isinstance(model, nn.Module) and weights is None:
        on_disk = check_model_data(model, config)
    if sample is not None and world.size == 1:
        check_step(model, config, sample, loss)
    engine = create_engine(model, config, weights, world, on_disk)
    return engine, engine.optimizer


def create_engine(
    model: Model, config: Config, weights: WeightSource | None, world: Processes, on_disk: bool | None = None
) -> Engine:
    """Create an engine. `on_disk`: what `check_model_data` returned; a model that will be on disk is built on disk."""
    explain = explain_refusal if world.size == 1 else None
    try:
        if config.disk is None or on_disk is False or isinstance(model, nn.Module) or weights is not None:
            return Engine(model, config, weights, world=world, explain_refusal=explain)
        with _built_on_disk(model, config, world) as build:
            return Engine(build, config, world=world, explain_refusal=explain)
    except BaseException as error:
        world.abort(error)
        raise


@contextmanager
def _built_on_disk(
    model: Callable[[], nn.Module], config: Config, world: Processes
) -> Iterator[Callable[[], nn.Module]]:
    """Return a function that builds the model within the budgets. See [Note: building a model larger than memory]."""
    assert config.disk is not None
    allocator, hardware = cpu_allocator(), Hardware(config.find_device())
    if allocator is None:
        yield model
        return
    device_bytes, host_bytes = budgets(config, hardware, len(world.local_ranks), several=world.size > 1)
    ram_bytes = host_bytes if hardware.has_gpu else device_bytes + host_bytes
    with FileBackedTensors(allocator, Path(config.disk.directory), ram_bytes) as tensors:

        def build() -> nn.Module:
            module = model()
            tensors.stop_allocating()
            # From now on the budgets are for chunks, and one parameter at a time is moved into its chunk.
            tensors.limit_bytes = max((param.nbytes for param in module.parameters()), default=0)
            return module

        yield build


def check_model_data(model: Model, config: Config) -> bool | None:
    """Build a model on the meta device, without memory, and refuse what is certain not to fit.

    A model that can't be built there is built in full before it is checked.

    Returns:
        Whether part of the model data will be on disk; None if the model can't be built on the meta device.

    Raises:
        BudgetError: The model data does not fit the tiers.
    """
    try:
        return _fit_check(model, config.find_device()).check_model_data(config)
    except (BudgetError, DiskError):
        raise
    except Exception as error:  # the model's own code, which may do anything
        _log.info("the model can't be built on the meta device, so it is built before it is checked: %r", error)
        return None


def _fit_check(model: Model, device: torch.device, loss: Callable[[Any], torch.Tensor] | None = None) -> "FitCheck":
    # Imported on first use: the dry run would add to `import patrickstar`.
    from patrickstar._dry_run.fit_check import FitCheck
    from patrickstar._dry_run.simulation import copy_to_meta

    return FitCheck(Engine, (lambda: copy_to_meta(model)) if isinstance(model, nn.Module) else model, device, loss)


def check_step(model: Model, config: Config, sample: Sample, loss: Callable[[Any], torch.Tensor] | None = None) -> None:
    """Dry-run a training step. Raises BudgetError with sufficient settings if it does not fit."""
    from patrickstar._dry_run.fit_check import Trial

    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    args = () if kwargs else (sample,) if isinstance(sample, torch.Tensor) else tuple(sample)
    try:
        check = _fit_check(model, config.find_device(), loss)
        trial = Trial(config, args, kwargs)
        check.run(trial)
    except BudgetError as error:
        raise _refusal(check, trial, error) from None
    except (ModelError, RuntimeError, NotImplementedError) as error:
        warnings.warn(f"the sample was not dry-run, so the first step finds out what fits: {error}", stacklevel=3)


def _refusal(check: "FitCheck", trial: Any, error: BudgetError) -> BudgetError:
    from patrickstar._dry_run.fit_check import refusal, sufficient_settings

    device, host = check.budgets(trial.config)
    return refusal(error, *sufficient_settings(check, trial, device, host))


def explain_refusal(core: EngineCore, inputs: tuple[Any, Any], error: BudgetError) -> BudgetError:
    """Return the error of a first step that did not fit, with settings that suffice, as far as dry runs find any."""
    from patrickstar._dry_run.fit_check import Trial

    args, kwargs = inputs
    check = _fit_check(core.module, core.device)
    budgets = {"device_memory": core.device_budget_bytes, "host_memory": core.host_budget_bytes}
    try:
        return _refusal(check, Trial(core.config.model_copy(update=budgets), args, kwargs), error)
    except Exception as failed:  # the dry run runs the model's code; its error must not replace this one
        error.add_note(f"No dry run could find settings that suffice: {failed}")
        return error
