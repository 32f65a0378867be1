"""Strategy of Lightning's Trainer with the engine as backend."""

import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config
from patrickstar.errors import CheckpointError, ConfigError, TrainingError
from patrickstar.integrations._merged_config import check_precision, merge_config
from patrickstar.integrations._optimizers import convert, move_scheduler
from patrickstar.integrations.lightning._precision import EnginePrecision
from patrickstar.integrations.lightning._processes import ProcessStrategy
from patrickstar.optim import Optimizer

ENGINE_FOLDER = "patrickstar"
"""Subfolder of a checkpoint for the engine's state."""
STATE_FILE = "lightning.ckpt"
"""File of a checkpoint with everything else."""
USED_BY = "_patrickstar_used_by"
"""Attribute of a module with the strategy whose engine manages it."""


class EngineForward(nn.Module):
    """Module whose forward calls the engine. It holds no parameters."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)


class UsedBy:
    """Strategy whose engine manages a module. A copy of the module is managed by none."""

    def __init__(self, strategy: "PatrickStarStrategy | None" = None) -> None:
        self._reference = None if strategy is None else weakref.ref(strategy)

    @property
    def strategy(self) -> "PatrickStarStrategy | None":
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> Any:
        return UsedBy, ()


class PatrickStarStrategy(ProcessStrategy):
    """Strategy for models larger than memory: `Trainer(strategy=PatrickStarStrategy(config))`.

    Several processes are started as by Lightning's `DDPStrategy`, and each stores a shard of the model data. Precision
    and device follow the Trainer's arguments, the optimizer is that of `configure_optimizers`; one that is set in
    `config` takes precedence.

    Args:
        config: Memory budgets and settings without an argument of Lightning: a `ps.Config`, a mapping of its options,
            or the path of a TOML file. Default: the memory that the machine has.
        **options: `cluster_environment`, `process_group_backend` and `timeout`, as for `DDPStrategy`.

    Raises:
        ConfigError: An option is invalid.
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | Path | None = None, **options: Any) -> None:
        self._user_config = Config.of(config)
        self._engine: Engine | None = None
        self._accumulates = False
        self._loads_engine = False
        self._frozen_for_evaluation: list[nn.Parameter] = []
        super().__init__(**options)

    @property
    def engine(self) -> Engine:
        """Engine, from the beginning of `fit`, `validate`, `test` or `predict`. It stays after their end.

        Raises:
            TrainingError: There is none yet.
        """
        if self._engine is None:
            raise TrainingError("there is no engine yet: trainer.fit, validate, test and predict create it")
        return self._engine

    @property
    def precision_plugin(self) -> Precision:
        """Plugin that runs backward and clipping through the engine."""
        return self._engine_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        given = Precision() if plugin is None else plugin
        self._engine_precision = EnginePrecision(given, lambda: self.engine, lambda: self._accumulates)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "the Trainer has connected it"
        return self.lightning_module

    # Setting up

    def setup(self, trainer: LightningTrainer) -> None:
        """Create the engine: optimizers and schedulers of `configure_optimizers` are converted to its own."""
        assert self.accelerator is not None, "the Trainer has connected it"
        self.accelerator.setup(trainer)
        module = self._module
        if trainer.state.fn == TrainerFn.FITTING:
            self._take_over(module)
            self.setup_optimizers(trainer)
            self._manage_training(module)
        elif self._engine is None or self._engine.module is not module:
            self._take_over(module)
            self._manage_evaluation(module)
        self.model = EngineForward(self.engine)

    def make_engine(self, model: nn.Module, config: Config) -> Engine:
        """Create the engine. Override this method to customize the engine.

        Args:
            model: The LightningModule.
            config: The configuration that results from the arguments, the optimizer and the user's `config`.

        Returns:
            The engine that manages the module.

        Raises:
            BudgetError, ConfigError, ModelError: As `patrickstar.initialize`.
        """
        return initialize(model, config)[0]

    def _manage_training(self, module: LightningModule) -> None:
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and an engine has one: use param "
                f"groups of one optimizer"
            )
        given, chosen = self.optimizers[0], self._user_config.model_fields_set
        options = self._user_config.optimizer if "optimizer" in chosen else convert(given, module)
        self._engine = self.make_engine(module, self._merged(options))
        for scheduler in {id(each.scheduler): each.scheduler for each in self.lr_scheduler_configs}.values():
            if scheduler.optimizer is given:
                move_scheduler(scheduler, given, self._engine.optimizer)
        self.optimizers = [self._engine.optimizer]

    def _manage_evaluation(self, module: LightningModule) -> None:
        """Create an engine without masters and states."""
        self._frozen_for_evaluation = [param for param in module.parameters() if param.requires_grad]
        module.requires_grad_(False)
        try:
            self._engine = self.make_engine(module, self._merged(self._user_config.optimizer))
        finally:
            if self._engine is None:
                self._close()

    def _merged(self, optimizer: Optimizer) -> Config:
        precision = self._engine_precision.engine_precision
        check_precision(self._user_config, precision, "Trainer(precision=...) selects")
        selected = f"the Trainer selects the device {str(self.root_device)!r} (accelerator=...)"
        return merge_config(self._user_config, precision, self.root_device, selected, optimizer)

    def _take_over(self, module: LightningModule) -> None:
        """Close this strategy's engine and the one of an earlier strategy that still manages the module."""
        self._close()
        earlier = vars(module).get(USED_BY, UsedBy())
        if earlier.strategy is not None:
            earlier.strategy._close()
        vars(module)[USED_BY] = UsedBy(self)

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        for param in self._frozen_for_evaluation:
            param.requires_grad_(True)
        self._frozen_for_evaluation.clear()

    def model_to_device(self) -> None:
        """Do nothing: the engine fetches parameters when they are needed."""

    def teardown(self) -> None:
        """Leave the parameters in the engine, so that checkpoints can be saved after training."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None, "the Trainer has connected it"
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step in the engine's forward; with manual optimization its calls of the module."""
        if self._module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context(), _traced_calls(self._module, self.engine):
            return self._module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients of backwards in this context be averaged over processes in a later one."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def synchronize(self) -> None:
        """Wait for the other processes, and serve their requests for this one's shards meanwhile."""
        if self._engine is not None and self._engine.world.size > 1:
            self._engine.average(0.0)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine loads the state."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine saves the parameters."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine saves the states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint. Every process must call it.

        It is a folder with the engine's checkpoint and a file with everything else. A checkpoint of weights alone is a
        file of Lightning's with parameters in full precision.

        Args:
            checkpoint: What Lightning saves beside parameters and optimizer states.
            filepath: Path; a checkpoint that is there is replaced.
            storage_options: Options of the checkpoint plugin for a file.

        Raises:
            CheckpointError: The engine's checkpoint can't be written.
        """
        path = Path(filepath)
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.engine.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        new, previous = path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.previous")
        if self.is_global_zero:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            torch.save(checkpoint, new / STATE_FILE)
        self.synchronize()
        self.engine.save(new / ENGINE_FOLDER)
        if self.is_global_zero:
            _remove(previous)
            if path.exists():
                path.rename(previous)
            new.rename(path)
            _remove(previous)
        self.synchronize()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint."""
        if self.is_global_zero:
            _remove(Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint: parameters and optimizer states into the engine, and everything else.

        Args:
            checkpoint_path: Folder that `save_checkpoint` has written, or a file of Lightning's.
            weights_only: As for `torch.load`.

        Returns:
            Everything else; of a file its whole content.

        Raises:
            CheckpointError: The folder is no checkpoint, or is of another model or optimizer.
        """
        path = Path(checkpoint_path)
        self._loads_engine = path.is_dir()
        if not self._loads_engine:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return loaded
        if not (path / ENGINE_FOLDER).is_dir() or not (path / STATE_FILE).is_file():
            raise CheckpointError(f"{path} is no checkpoint of this strategy: it lacks {ENGINE_FOLDER} or {STATE_FILE}")
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.load(path / ENGINE_FOLDER)
        else:
            raise CheckpointError(
                f"{path} holds the state of a training run, and an evaluation loads weights alone: save them with "
                f"trainer.save_checkpoint(path, weights_only=True)"
            )
        state: dict[str, Any] = torch.load(path / STATE_FILE, weights_only=bool(weights_only))
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the parameters of a checkpoint file; the engine has loaded those of a folder."""
        if not self._loads_engine:
            self.engine.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing for a folder, whose states the engine has loaded; refuse those of a file.

        Raises:
            CheckpointError: The checkpoint is a file of another strategy.
        """
        if not self._loads_engine:
            raise CheckpointError(
                "the checkpoint is of another strategy, and its optimizer states can't be loaded: load its weights "
                "with load_from_checkpoint, and start a new run"
            )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _traced_calls(module: LightningModule, engine: Engine) -> Iterator[None]:
    """Let calls of a module in this context open iterations of the engine, which traces them."""
    own = vars(module).get("forward")
    forward, inside = module.forward, False

    def traced(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not module.training:
            return forward(*args, **kwargs)
        inside = True
        try:
            return engine(*args, **kwargs)
        finally:
            inside = False

    vars(module)["forward"] = traced
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
