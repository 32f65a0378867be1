"""Strategy of Lightning Fabric with the engine as backend."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.init import _EmptyInit
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from patrickstar.config import Config
from patrickstar.errors import CheckpointError, ConfigError, TrainingError
from patrickstar.integrations.lightning._checkpoint_folder import ENGINE_FOLDER, check_folder, load_rest, save_folder
from patrickstar.integrations.lightning._engine_strategy import EngineForward, EngineStrategy
from patrickstar.integrations.lightning._precision import EngineFabricPrecision


class _Accumulation(_BackwardSyncControl):
    """Control of which backward averages gradients over processes."""

    def __init__(self, accumulating: Callable[[], AbstractContextManager[None]]) -> None:
        self._accumulating = accumulating

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._accumulating() if enabled else nullcontext()


class PatrickStarFabricStrategy(EngineStrategy, ParallelStrategy):
    """Strategy for models larger than memory: `lightning.Fabric(strategy=PatrickStarFabricStrategy(config))`.

    Several processes are started as by Fabric's `DDPStrategy`, and each stores a shard of the model data. Precision and
    device follow Fabric's arguments, the optimizer is the one of `fabric.setup(model, optimizer)`; one that is set in
    `config` takes precedence.

    Args:
        config: Memory budgets and settings without an argument of Fabric: a `ps.Config`, a mapping of its options, or
            the path of a TOML file. Default: the memory that the machine has.
        **options: `cluster_environment`, `process_group_backend` and `timeout`, as for `DDPStrategy`.

    Raises:
        ConfigError: An option is invalid.
    """

    caller = "Fabric"
    creators = "fabric.setup(model, optimizer) and fabric.setup_module(model)"
    launcher_class = _SubprocessScriptLauncher

    def __init__(self, config: Config | Mapping[str, Any] | str | Path | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._backward_sync_control = _Accumulation(self.accumulating)

    @property
    def precision(self) -> Precision:
        """Plugin that runs backward through the engine."""
        return self._fabric_precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        given = Precision() if plugin is None else plugin
        self._fabric_precision = EngineFabricPrecision(given, lambda: self.engine, lambda: self._accumulates)

    @property
    def engine_precision(self) -> str:
        """Precision of the engine."""
        return self._fabric_precision.engine_precision

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    # Setting up

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Create the engine; the optimizer is converted to its own.

        Args:
            module: Module.
            optimizers: Its optimizer.
            scheduler: Learning-rate scheduler of the optimizer.

        Returns:
            A module whose forward runs in the engine, the engine's optimizer, and the scheduler, which changes it.

        Raises:
            BudgetError, ModelError: As `patrickstar.initialize`.
            ConfigError: There is more than one model or optimizer, or a scheduler of the optimizer is missing.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                f"fabric.setup got {len(optimizers)} optimizers, and an engine has one: use param groups of one "
                f"optimizer"
            )
        given = optimizers[0]
        if scheduler is None and hasattr(given.step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                f"a scheduler was created from the {type(given).__name__} before, and would change the learning rates "
                f"of an optimizer that does not train: pass it, as in fabric.setup(model, optimizer, "
                f"scheduler=scheduler), or create it from the optimizer that fabric.setup returns"
            )
        self._replace_engine(module)
        engine = self.manage_training(module, given)
        if isinstance(scheduler, LRScheduler):
            self.move(scheduler)
        return EngineForward(engine), [engine.optimizer], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Create an engine without masters and states, to evaluate a module.

        Returns:
            A module whose forward runs in the engine.

        Raises:
            BudgetError, ModelError: As `patrickstar.initialize`.
            ConfigError: The strategy has the engine of another model.
        """
        self._replace_engine(module)
        return EngineForward(self.manage_evaluation(module))

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise ConfigError: the engine is created with the optimizer."""
        raise ConfigError(
            "an optimizer can't be set up without its model: call fabric.setup(model, optimizer) instead of "
            "fabric.setup_module and fabric.setup_optimizers"
        )

    def _replace_engine(self, module: nn.Module) -> None:
        if self._engine is not None and self._engine.module is not module:
            raise ConfigError(
                f"fabric.setup got a {type(module).__name__}, and the engine of this Fabric manages a "
                f"{type(self._engine.module).__name__}: leave a model that is only read out of fabric.setup, or call "
                f"ps.initialize(model, config, frozen=...); call fabric.strategy.close() if the first is done"
            )
        self.take_over(module)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine fetches parameters when they are needed."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which modules are created on the host; with `empty_init` without initial values."""
        context: AbstractContextManager[None] = _EmptyInit(enabled=bool(empty_init))
        return context

    # Training

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or another reduction, of a tensor over all processes; other objects unchanged."""
        return self.reduce(tensor, group, reduce_op)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip gradients by their global norm in the next step; see `Engine.clip_grad_norm_`."""
        return self.engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Raise TrainingError: chunks store gradients until they are reduced."""
        raise TrainingError("fabric.clip_gradients(clip_val=...) is not supported: use max_norm, the global norm")

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the parameters in full precision. Every process must call it."""
        return self.engine.state_dict() if self._is_model(module) else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load parameters into the engine."""
        if self._is_model(module):
            self.engine.load_state_dict(state_dict, strict)
        else:
            super().load_module_state_dict(module, state_dict, strict)

    def _is_model(self, value: Any) -> bool:
        engine = self._engine
        inner = value.engine if isinstance(value, EngineForward) else None
        return engine is not None and (value is engine.module or inner is engine)

    def _keys_of_engine(self, state: Mapping[str, Any]) -> set[str]:
        """Return the keys of the model and the optimizer; none if the optimizer is not among the values.

        Raises:
            CheckpointError: There is the optimizer without the model.
        """
        optimizer = None if self._engine is None else self._engine.optimizer
        optimizers = {key for key, value in state.items() if optimizer is not None and value is optimizer}
        models = {key for key, value in state.items() if self._is_model(value)}
        if optimizers and not models:
            raise CheckpointError(
                f"the state has the optimizer ({optimizers.pop()!r}) without the model, and the engine saves and loads "
                f"them together: add the model"
            )
        return optimizers | models if optimizers else set()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Save a checkpoint. Every process must call it.

        With the optimizer in `state` it is a folder with the engine's checkpoint and a file with everything else.
        Without, it is a file of Fabric's, with parameters in full precision.

        Args:
            path: Path; a checkpoint that is there is replaced.
            state: Model, optimizer, and anything else.
            storage_options: Options of the checkpoint plugin for a file.
            filter: Which entries of a file are saved.

        Raises:
            CheckpointError: The engine's checkpoint can't be written, or `filter` is given for a folder.
        """
        own = self._keys_of_engine(state)
        if not own:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise CheckpointError(
                "fabric.save can't filter a checkpoint with the optimizer, which the engine writes whole: save the "
                "model without the optimizer, and filter that"
            )
        rest = {key: value for key, value in state.items() if key not in own}
        save_folder(Path(path), self.engine, self._convert_stateful_objects_in_state(rest, filter={}))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint. Every process must call it.

        Args:
            path: Folder that `save_checkpoint` has written, or a file of Fabric's.
            state: Objects that are restored, by name; of a folder model and optimizer together.
            strict: Refuse names that the checkpoint does not have.
            weights_only: As for `torch.load`.

        Returns:
            What was not restored into `state`.

        Raises:
            CheckpointError: The folder is no checkpoint, or is of another model or optimizer.
            KeyError: A name is not in the checkpoint.
        """
        folder = Path(path)
        if not folder.is_dir():
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return loaded
        check_folder(folder)
        own = self._keys_of_engine(state) if isinstance(state, dict) else set()
        if not own:
            raise CheckpointError(
                f"{path} holds the state of a training run: load model and optimizer together, as in "
                f"fabric.load(path, {{'model': model, 'optimizer': optimizer}})"
            )
        rest = load_rest(folder, weights_only)
        _validate_keys_for_strict_loading(state.keys() - own, rest.keys(), strict)
        self.engine.load(folder / ENGINE_FOLDER)
        for name in [name for name in state if name in rest]:
            value = rest.pop(name)
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
            else:
                state[name] = value
        return rest
