"""Creation of an engine, alone or in a process group; refusal of what does not fit, before memory is taken."""

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from patrickstar._distributed.process_group import Processes, World
from patrickstar._distributed.single_process import SINGLE_PROCESS
from patrickstar._dry_run.precision_choice import settle_precision
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine import Engine
from patrickstar._engine.input_record import InputRecord
from patrickstar._engine.param_init import WeightSource
from patrickstar._tiers.hardware import Hardware
from patrickstar.config import Config
from patrickstar.errors import BudgetError, ConfigError, DiskError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from patrickstar._dry_run.fit_check import FitCheck

_log = logging.getLogger(__name__)

Model = nn.Module | Callable[[], nn.Module]
Sample = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


class Initialized(NamedTuple):
    """An engine and its optimizer; `with ps.initialize(...) as (engine, optimizer):` closes the engine at the end."""

    engine: Engine
    optimizer: ChunkOptimizer

    def __enter__(self) -> "Initialized":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.__exit__(kind, error, trace)


def initialize(
    model: Model,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    weights: WeightSource | None = None,
    *,
    mesh: "DeviceMesh | None" = None,
    sample: Sample | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    frozen: Mapping[str, nn.Module] | None = None,
) -> "Initialized":
    """Create an engine that manages a model, and its optimizer.

    If torchrun started several processes, or the script has called `torch.distributed.init_process_group`, every
    process must call it, and each stores a shard of the model data.

    Args:
        model: Function that builds the module, or the module itself. The function is first called on the meta device,
            where it takes no memory, so that a model that does not fit is refused before it is built; a model larger
            than memory is then built on the disk. So it has to build everything anew at each call.
        config: Budgets, precision and optimizer: a `Config`, a mapping of its options, or the path of a TOML file with
            them. Default: `Config()`.
        weights: Returns the value of a parameter by its name, for parameters on the meta device.
        mesh: Data-parallel dimensions of a `DeviceMesh`, as for `fully_shard`: one dimension shards, two are
            (replicate, shard). Default: all processes. How operators are sharded is read from parameters that are
            DTensors.
        sample: Inputs of the model as in training: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            A training step with them is dry-run before memory is taken, and refused if it does not fit, with settings
            that suffice. Without it, the first step finds out. With several processes each checks its own budgets, and
            all are refused if one is; parameters that are DTensors can't be dry-run so.
        loss: Returns the loss from the model's output, for the dry run. Default: its attribute `loss`, or the output.
        frozen: Further modules by name, which are only read, such as the reference model of DPO. Their parameters are
            frozen (2 bytes each with bf16 or fp16) and share the budgets. `engine.call_frozen` runs them.

    Returns:
        The engine, to be called in place of the model, and the optimizer (`engine.optimizer`). In a `with` statement
        the engine is closed at the end.

    Raises:
        BudgetError: The model data, or a training step with `sample`, exceeds the budgets.
        ConfigError: An option is invalid, or the processes differ in model, options or versions.
        DeviceError: The compute device is not available.
        ModelError: A parameter or buffer cannot be managed.
    """
    config = Config.of(config)
    device = config.find_device()
    world = World.find(device)
    config = settle_precision(config, model, device, world)
    builds = not isinstance(model, nn.Module) and weights is None
    if not frozen and (sample is not None or (builds and world.size == 1)):
        refused = None
        try:
            check_fit(model, config, sample, loss, world, mesh)
        except BudgetError as error:
            refused = error
        if (refused := world.agree_on_error(refused, BudgetError)) is not None:
            raise refused
    engine = create_engine(model, config, weights, world, mesh, frozen)
    return Initialized(engine, engine.optimizer)


def create_engine(
    model: Model,
    config: Config,
    weights: WeightSource | None,
    world: Processes,
    mesh: "DeviceMesh | None" = None,
    frozen: Mapping[str, nn.Module] | None = None,
) -> Engine:
    """Create an engine in a process group, whose other processes learn of an error."""
    explain = explain_refusal if world.size == 1 and not frozen else None
    try:
        return Engine(model, config, weights, world=world, mesh=mesh, frozen=frozen, explain_refusal=explain)
    except BaseException as error:
        world.abort(error)
        raise


def check_fit(
    model: Model,
    config: Config,
    sample: Sample | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    world: Processes = SINGLE_PROCESS,
    mesh: "DeviceMesh | None" = None,
) -> None:
    """Refuse what does not fit, before memory is taken: the model data, and a dry run of a step with the sample.

    The model is built on the meta device, without memory. A model that can't be built there is built in full before
    its model data is checked. Several processes refuse model data when they have agreed on its layout.

    Raises:
        BudgetError: The model data or the step exceeds the budgets. With a sample it names settings that suffice.
    """
    from patrickstar._dry_run.fit_check import Trial

    hardware = Hardware(config.find_device())
    replicas = mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1
    check = _fit_check(model, hardware, loss, world, replicas)
    trial = None if sample is None else Trial.of(config, sample)
    try:
        if world.size == 1:
            check.check_model_data(config)
        if trial is not None:
            check.run(trial)
    except (ConfigError, DiskError):
        raise
    except BudgetError as error:
        if trial is None or not check.machine_may_suffice(config, error):
            raise
        raise check.explained(trial, error) from None
    except Exception as error:  # the model's own code, which may do anything
        reason = "the dry run can't run the model's code, so the first step finds out what fits"
        if trial is not None:
            warnings.warn(f"{reason}: {error}", stacklevel=3)
        _log.info("%s: %r", reason, error)


def _fit_check(
    model: Model,
    hardware: Hardware,
    loss: Callable[[Any], torch.Tensor] | None = None,
    world: Processes = SINGLE_PROCESS,
    replicas: int = 1,
) -> "FitCheck":
    # Imported on first use: the dry run would add to `import patrickstar`.
    from patrickstar._dry_run.fit_check import FitCheck
    from patrickstar._dry_run.simulation import copy_to_meta

    build = (lambda: copy_to_meta(model)) if isinstance(model, nn.Module) else model
    return FitCheck(Engine, build, hardware, loss, world.size, replicas, len(world.local_ranks))


def explain_refusal(core: EngineCore, inputs: InputRecord, error: BudgetError) -> BudgetError:
    """Return the error of a first step that did not fit, with settings that suffice, as far as dry runs find any."""
    from patrickstar._dry_run.fit_check import Trial

    hardware = core.manager.hardware
    try:
        args, kwargs = inputs.inputs()
        check = _fit_check(core.module, hardware)
        # Budgets that the user left open depend on what is advised. A GPU's is measured, and the engine has taken it.
        device = {"device_memory": core.device_budget_bytes} if hardware.has_gpu else {}
        trial = Trial(core.config.model_copy(update=device), args, kwargs)
        try:
            check.run(trial)
        except BudgetError as predicted:
            error.module = predicted.module
        return check.explained(trial, error)
    except Exception as failed:  # the dry run runs the model's code; its error must not replace this one
        error.add_note(f"No dry run could find settings that suffice: {failed}")
        return error
