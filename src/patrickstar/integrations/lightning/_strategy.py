"""Strategy of Lightning's Trainer with the engine as backend."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn

from patrickstar._engine.engine import Engine
from patrickstar.config import Config
from patrickstar.errors import CheckpointError, ConfigError
from patrickstar.integrations.lightning._checkpoint_folder import (
    ENGINE_FOLDER,
    check_folder,
    load_rest,
    load_weights,
    remove,
    save_folder,
)
from patrickstar.integrations.lightning._engine_strategy import EngineForward, EngineStrategy
from patrickstar.integrations.lightning._precision import EnginePrecision


class PatrickStarStrategy(EngineStrategy, ParallelStrategy):
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

    caller = "Trainer"
    creators = "trainer.fit, validate, test and predict"
    launcher_class = _SubprocessScriptLauncher

    def __init__(self, config: Config | Mapping[str, Any] | str | Path | None = None, **options: Any) -> None:
        self._loads_engine = False
        super().__init__(config, **options)

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
            self.take_over(module)
            self.setup_optimizers(trainer)
            self._manage_training(module)
        elif self._engine is None or self._engine.module is not module:
            self.take_over(module)
            self.manage_evaluation(module)
        self.model = EngineForward(self.engine)

    def _manage_training(self, module: LightningModule) -> None:
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and an engine has one: use param "
                f"groups of one optimizer"
            )
        if not self.optimizers[0].param_groups:  # Lightning's stand-in for the optimizer of a hook that returns None
            raise ConfigError(
                "configure_optimizers returned no optimizer: return the one that trains, or call trainer.validate, "
                "test or predict for a module that is not trained"
            )
        engine = self.manage_training(module, self.optimizers[0])
        for scheduler in {id(each.scheduler): each.scheduler for each in self.lr_scheduler_configs}.values():
            self.move(scheduler)
        self.optimizers = [engine.optimizer]

    @property
    def engine_precision(self) -> str:
        """Precision of the engine."""
        return self._engine_precision.engine_precision

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

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a context whose backwards leave averaging over processes to a later one."""
        return self.accumulating()

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
        save_folder(path, self.engine, checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint."""
        if self.is_global_zero:
            remove(Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint: parameters into the engine, to train also optimizer states, and everything else.

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
        check_folder(path)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.load(path / ENGINE_FOLDER)
        else:
            load_weights(path, self.engine)
        return load_rest(path, weights_only)

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
        # Else ModelCheckpoint saves this step again after the next micro-batch, whose gradients wait for the others.
        trainer = self._module.trainer
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback._last_global_step_saved = trainer.global_step


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
