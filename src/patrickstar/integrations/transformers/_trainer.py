"""transformers' Trainer with the engine as backend."""

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints

from patrickstar._checkpoint.metadata import precision_of, random_states, restore_random_states
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config
from patrickstar.errors import BudgetError, ConfigError, TrainingError
from patrickstar.integrations._engine_accelerator import Managed
from patrickstar.integrations._optimizers import ParamGroups
from patrickstar.integrations._weight_files import save_weights
from patrickstar.integrations.transformers import _training_args as training_args
from patrickstar.integrations.transformers._checkpoint_folders import CheckpointFolders
from patrickstar.integrations.transformers._distributed_config import ModelParallelism, distributed_config
from patrickstar.integrations.transformers._record_callback import RecordCallback
from patrickstar.integrations.transformers._saved_weights import (
    is_adapted,
    make_savable,
    saved_weights,
)
from patrickstar.integrations.transformers._trainer_accelerator import TrainerAccelerator
from patrickstar.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ENGINE_FOLDER = "patrickstar"
"""Subfolder of a checkpoint for the engine's state."""
SCHEDULER_FILE = "scheduler.pt"
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.bin"
SAVED_AT_INTERVALS = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for models larger than memory.

    Precision, device and optimizer follow the training arguments; an `optimizer` set in `config` takes precedence.

    Args:
        *args: Positional arguments of `transformers.Trainer`.
        config: Memory budgets (`device_memory`, `host_memory`, `disk`, `chunk_size`; bytes, or text such as "4GiB")
            and settings without a training argument. Default: the memory that the machine has.
        **options: Keyword arguments of `transformers.Trainer`.

    Raises:
        ConfigError: An argument conflicts with the engine's management of the model, such as FSDP or DeepSpeed.
    """

    # transformers assigns None or objects of several classes to these.
    model: Any
    optimizer: Any
    lr_scheduler: Any
    current_flos: Any

    def __init__(self, *args: Any, config: Config | None = None, **options: Any) -> None:
        self._user_config = config if config is not None else Config()
        self._managed: Managed | None = None
        self._resumed: Path | None = None
        """Checkpoint that training resumes, whose precision an engine has that is created then."""
        self._parallelism: ModelParallelism | None = None
        self._user_optimizer: Any = None
        super().__init__(*args, **options)

    @property
    def engine(self) -> Engine:
        """Engine, created on first access; from then on chunks store the model's parameters.

        Raises:
            BudgetError, ConfigError, ModelError: As `patrickstar.initialize`, on first access.
        """
        return self._manage().engine

    def make_engine(self, model: nn.Module, config: Config) -> Engine:
        """Create the engine. Override this method to customize it, and pass `mesh` and `frozen_modules` on to it.

        Args:
            model: The model to train.
            config: The configuration that results from the training arguments and the user's `config`.

        Returns:
            The engine that manages the model.

        Raises:
            BudgetError, ConfigError, ModelError: As `patrickstar.initialize`.
        """
        return initialize(model, config, mesh=self.mesh, frozen=self.frozen_modules)[0]

    def record(self, log: str | Path | None = None, *, tensorboard: str | Path | None = None) -> None:
        """Record the steps of later calls of `train()`, for `patrickstar report`; see `Engine.record`.

        The Trainer's progress bar then shows the memory of each tier and the share of waits.

        Args:
            log: File of JSON lines. A resumed training continues it.
            tensorboard: Directory for scalars of each step in TensorBoard's format, continued as well. Default: none.
        """
        self.add_callback(RecordCallback(lambda: self.engine, lambda: self.callback_handler, log, tensorboard))

    @property
    def mesh(self) -> "DeviceMesh | None":
        """Data-parallel dimensions of the device mesh, for `patrickstar.initialize`; None if it is all processes."""
        return None if self._parallelism is None else self._parallelism.meshes.data

    @property
    def frozen_modules(self) -> dict[str, nn.Module]:
        """Modules that are only read, such as a reference model, for `patrickstar.initialize`."""
        frozen: dict[str, nn.Module] = self.accelerator.frozen
        return frozen

    def _manage(self) -> Managed:
        if self._managed is None or self._managed.module is not self.model:
            if self._managed is not None:
                # `model_init` created a new model; the previous one is not trained any more.
                self._managed.engine.close(keep=False)
            self._divide()
            config = training_args.merge(self._user_config, self.args, self._chosen_optimizer())
            if config.precision == "auto" and self._resumed is not None:
                config = config.with_precision(precision_of(self._resumed))
            engine = self.make_engine(self.model, config)
            make_savable(engine)
            self._managed = Managed(engine)
            self.accelerator.engine = engine
        return self._managed

    def _divide(self) -> None:
        """Divide the model over processes as its `DistributedConfig` asks for."""
        if self._parallelism is not None:
            self._parallelism.divide(self.model)
        elif distributed_config(self.model) is not None and self.args.world_size > 1:
            raise ConfigError(
                "model.config.distributed_config was set after the Trainer was created, or by model_init: set it "
                "before, on a model that is passed as model"
            )

    # Arguments

    def _validate_args(self) -> None:
        super()._validate_args()
        training_args.refuse(self.args)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigError(
                "accelerate's settings require FSDP or DeepSpeed; the engine shards the model data itself: start the "
                "processes with torchrun"
            )
        if self._tensor_processes > 1 and self.args.train_sampling_strategy == "batch_rebalance":
            raise ConfigError(
                "TrainingArguments(train_sampling_strategy='batch_rebalance') gives each process a batch of its own, "
                "and tensor parallelism requires one for several processes: use 'group_by_length'"
            )
        if self.lr_scheduler is not None:
            raise ConfigError(
                "a scheduler can't be passed, since the engine creates its optimizer later: choose it by "
                "lr_scheduler_type, or override create_scheduler"
            )
        self._user_optimizer, self.optimizer = self.optimizer, None

    def _chosen_optimizer(self) -> Optimizer:
        if "optimizer" in self._user_config.model_fields_set:
            return self._user_config.optimizer
        if self._user_optimizer is not None:
            return training_args.from_argument(self._user_optimizer, self._param_groups)
        if self.optimizer_cls_and_kwargs is not None:
            kind, options = self.optimizer_cls_and_kwargs
            return training_args.from_class(kind, options, self._param_groups, f"optimizer_cls_and_kwargs={kind!r}")
        named = training_args.from_args(self.args, self._param_groups)
        if named is not None:
            return named
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        return training_args.from_optim(kind, options, self._param_groups, training_args.name_of_optim(self.args))

    @property
    def _param_groups(self) -> ParamGroups:
        return training_args.decay_groups(self.get_decay_parameter_names(self.model), self.args.weight_decay)

    # Training and evaluation loops

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        accelerator_args: dict[str, Any] = super()._build_accelerator_args(**options)
        accelerator_args.pop("parallelism_config", None)  # of a model with tp_size; the engine's accelerator has meshes
        return accelerator_args | {"mixed_precision": "no"}  # operators run in the engine's precision, without autocast

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that delegates the model to the engine."""
        super().create_accelerator_and_postprocess()
        engine = self._managed.engine if self._managed is not None else None
        if self._parallelism is None and self.model is not None:
            processes = self.args.process_index, self.args.world_size
            self._parallelism = ModelParallelism.of(self.model, *processes, self.args.device.type)
        if self._parallelism is not None:
            self.model._tp_size = self._parallelism.sizes.tp  # transformers counts batches and tokens by it
        self.accelerator = TrainerAccelerator.from_accelerator(
            self.accelerator, engine, self._parallelism, lambda: self.engine
        )
        # transformers has bound the method of the class that the accelerator had.
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the engine fetches parameters when they are needed."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the engine's optimizer; `model` is ignored."""
        if self.optimizer is None:
            self.optimizer = self.engine.optimizer
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        managed = self._manage()
        if training and self.optimizer is not managed.engine.optimizer:
            raise ConfigError(
                f"the optimizer is a {type(self.optimizer).__name__}, but the engine's optimizer is required: choose "
                f"it by optim, optimizer_cls_and_kwargs or ps.Config(optimizer=...), not in create_optimizer"
            )
        return managed

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # chunks store gradients; `p.grad` cannot be tested for being a DTensor

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch through the engine; see `transformers.Trainer.training_step`.

        Raises:
            BudgetError: The batch does not fit into the memory budgets.
            RuntimeError: The same, if `auto_find_batch_size` is set: accelerate then retries with a smaller batch.
        """
        try:
            loss: torch.Tensor = super().training_step(*args, **options)
        except BudgetError as error:
            if not self.args.auto_find_batch_size:
                raise
            # accelerate recognizes this text and retries with a smaller batch.
            raise RuntimeError(f"{error} This batch is out of memory.") from error
        return loss

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate the newest parameters; see `transformers.Trainer.evaluation_loop`. It ends a delay of updates."""
        if self._managed is not None:
            self._managed.engine.optimizer.flush()
        return super().evaluation_loop(*args, **options)

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Return loss, logits and labels of a batch; see `transformers.Trainer.prediction_step`."""
        outputs = super().prediction_step(*args, **options)
        self.accelerator.synchronize()
        return outputs

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.accelerator.synchronize()
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self._tensor_processes

    def store_flos(self) -> None:
        """Add the operations of all processes to the trainer state; each has counted those of its whole batch."""
        self.current_flos /= self._tensor_processes
        super().store_flos()

    @property
    def _tensor_processes(self) -> int:
        """Number of processes that share a batch."""
        return 1 if self._parallelism is None else self._parallelism.sizes.tp

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        checkpoints = CheckpointFolders(Path(self._get_output_dir(trial=trial)))
        step, best_step = self.state.global_step, self.state.best_global_step
        partial = checkpoints.partial(step)
        if self.args.should_save:
            checkpoints.begin(step)
        self.accelerator.synchronize()
        self.save_model(str(partial), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(partial))
            self._save_rng_state(str(partial))
        if self.args.save_strategy in SAVED_AT_INTERVALS and best_step:
            best = checkpoints.complete(best_step)
            if best_step == step or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        self.accelerator.synchronize()
        if self.args.should_save:
            self._save_callback_states()
            self.state.save_to_json(str(partial / STATE_FILE))
            checkpoints.finish(step)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(checkpoints.complete(step)))
            rotate_checkpoints(
                output_dir=str(checkpoints.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.synchronize()

    def _save_callback_states(self) -> None:
        """Copy the states of callbacks to the trainer state."""
        states: Any = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(states[name], list):
                    states[name].append(state)
                else:
                    states[name] = state

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._managed is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self._get_output_dir(None))
        self.engine.optimizer.eval()  # a schedule-free optimizer trains other parameters than those to be used
        if is_adapted(self.model):
            self.model.save_pretrained(str(folder), is_main_process=self.args.should_save)
        else:
            save_weights(self.engine, folder)
        if not self.args.should_save:
            return
        for processor in (self.processing_class, getattr(self.data_collator, "tokenizer", None)):
            if processor is not None:
                processor.save_pretrained(str(folder))
                break
        torch.save(self.args, folder / ARGUMENTS_FILE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.optimizer.train()
        # A PEFT checkpoint omits the frozen base model.
        self.engine.save(Path(output_dir) / ENGINE_FOLDER, frozen=not is_adapted(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / ENGINE_FOLDER).is_dir():
            self._resumed = folder / ENGINE_FOLDER
            return  # _load_optimizer_and_scheduler loads the parameters too, once there is an engine
        if (folder / OPTIMIZER_FILE).is_file():
            raise TrainingError(
                f"{folder} is a checkpoint of transformers' own Trainer, which saves the optimizer as a pickle; load "
                f"the model from it with from_pretrained and start a new run"
            )
        self._load_weights(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (folder := Path(checkpoint) / ENGINE_FOLDER).is_dir():
            return
        self.engine.load(folder)
        path = Path(checkpoint) / SCHEDULER_FILE
        if path.is_file():
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))
        else:
            warnings.warn(f"{checkpoint} has no {SCHEDULER_FILE}: the learning rate schedule restarts", stacklevel=2)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random generators; processes that share a batch continue with those of the first one."""
        super()._load_rng_state(checkpoint)
        if self._parallelism is not None and self._parallelism.meshes.tp is not None:
            states = [random_states(self.args.device)]
            dist.broadcast_object_list(states, group=self._parallelism.meshes.tp.get_group(), group_src=0)
            restore_random_states(states[0], self.args.device)

    def _load_best_model(self) -> None:
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def _load_weights(self, folder: Path) -> None:
        """Load parameters (with PEFT: adapters), and keep the optimizer states."""
        self.engine.load_state_dict(saved_weights(folder, self.model), strict=not is_adapted(self.model))
