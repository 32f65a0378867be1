"""transformers' Trainer on top of the engine."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from patrickstar._checkpoint.atomic_dir import fsync_dir
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config
from patrickstar.errors import BudgetError, ConfigError, TrainingError
from patrickstar.integrations.transformers import _training_args as training_args
from patrickstar.integrations.transformers._accelerator import EngineAccelerator, Managed
from patrickstar.integrations.transformers._save_weights import save_weights
from patrickstar.integrations.transformers._saved_weights import is_adapted, saved_weights
from patrickstar.optim import Optimizer

ENGINE_FOLDER = "patrickstar"
"""What the engine saves of itself, within a checkpoint."""
PARTIAL = "partial-"
"""What the name of a checkpoint begins with until it is complete: nobody looks for such a name."""
BEFORE = "-before"
"""What the name of one ends with that makes way for another."""
SCHEDULER_FILE = "scheduler.pt"
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.bin"
SAVED_AT_INTERVALS = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for models larger than memory: takes all that one takes, and a `config`.

    config: budgets (`device_memory`, `host_memory`, `disk`, `chunk_size`), and what has no argument of its own. Left
    out, what the machine has. Precision, device and optimizer come from the arguments; an `optimizer` in the config
    is used as it is. Raises ConfigError for arguments that ask for another way to hold the model.
    """

    # transformers has these as None or one of several classes, at any time.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, config: Config | None = None, **options: Any) -> None:
        self._given = config if config is not None else Config()
        self._managed: Managed | None = None
        self._asked_for: Any = None
        super().__init__(*args, **options)

    @property
    def engine(self) -> Engine:
        """The engine, made when it is first asked for: the model's parameters lie in chunks from then on."""
        return self._manage().engine

    def make_engine(self, model: nn.Module, config: Config) -> Engine:
        """Put the model under management; override it to make the engine otherwise."""
        return initialize(model, config)[0]

    def _manage(self) -> Managed:
        if self._managed is None or self._managed.module is not self.model:
            if self._managed is not None:
                # `model_init` has made another model: nobody trains this one any more.
                self._managed.engine.close(keep=False)
            engine = self.make_engine(
                self.model, training_args.complete(self._given, self.args, self._chosen_optimizer())
            )
            self._managed = Managed(engine)
            self.accelerator.engine = engine
        return self._managed

    # What is asked for

    def _validate_args(self) -> None:
        super()._validate_args()
        training_args.refuse(self.args)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers:
            raise ConfigError(
                "the model or accelerate's settings are made for FSDP, DeepSpeed or tensor parallelism; the engine "
                "shares the model data itself: start the processes with torchrun"
            )
        if getattr(self.model, "is_quantized", False):
            raise ConfigError("the model is quantized, which the engine does not manage; load it in 16 bits")
        if self.lr_scheduler is not None:
            raise ConfigError(
                "a scheduler can't be given before its optimizer is made, which the engine does: choose it by "
                "lr_scheduler_type, or override create_scheduler"
            )
        self._asked_for, self.optimizer = self.optimizer, None

    def _chosen_optimizer(self) -> Optimizer:
        if "optimizer" in self._given.model_fields_set:
            return self._given.optimizer
        if self._asked_for is not None:
            return training_args.of_argument(self._asked_for, self._param_groups)
        if self.optimizer_cls_and_kwargs is not None:
            kind, options = self.optimizer_cls_and_kwargs
            return training_args.of_class(kind, options, self._param_groups, f"optimizer_cls_and_kwargs of {kind!r}")
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        return training_args.named(kind, options, self._param_groups, str(self.args.optim))

    @property
    def _param_groups(self) -> training_args.ParamGroups:
        return training_args.decay_groups(self.get_decay_parameter_names(self.model), self.args.weight_decay)

    # In the Trainer's loops

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**options)
        return found | {"mixed_precision": "no"}  # operators run in the engine's precision, without autocast

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as one that leaves the model to the engine."""
        super().create_accelerator_and_postprocess()
        engine = self._managed.engine if self._managed is not None else None
        self.accelerator = EngineAccelerator.taking_over(self.accelerator, engine)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine brings parameters to the device when they are needed."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The engine's optimizer."""
        if self.optimizer is None:
            self.optimizer = self.engine.optimizer
        found: torch.optim.Optimizer = self.optimizer
        return found

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        managed = self._manage()
        if training and self.optimizer is not managed.engine.optimizer:
            raise ConfigError(
                f"the optimizer is {type(self.optimizer).__name__}, made over parameters; the engine's is needed: "
                f"choose it by optim, optimizer_cls_and_kwargs or ps.Config(optimizer=...), not in create_optimizer"
            )
        return managed

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # they lie in chunks, where `p.grad` can't be asked whether it is a DTensor

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch, by the engine."""
        try:
            loss: torch.Tensor = super().training_step(*args, **options)
        except BudgetError as error:
            if not self.args.auto_find_batch_size:
                raise
            # As accelerate knows that a smaller batch may help.
            raise RuntimeError(f"{error} This batch is out of memory.") from error
        return loss

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Loss, logits and labels of a batch, by the engine."""
        found = super().prediction_step(*args, **options)
        self._meet()
        return found

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self._meet()
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]

    def _meet(self) -> None:
        """Wait for the other processes, and serve them meanwhile.

        Who waits in a collective of accelerate's does not serve, and another may still need its part of a parameter.
        """
        if self._managed is not None and self._managed.engine.world is not None:
            self._managed.engine.average(0.0)

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = Path(self._get_output_dir(trial=trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        partial, complete = folder / f"{PARTIAL}{name}", folder / name
        if self.args.should_save:
            _tidy(folder)
            partial.mkdir(parents=True)
        self._meet()
        self.save_model(str(partial), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(partial))
            self._save_rng_state(str(partial))
        if self.args.save_strategy in SAVED_AT_INTERVALS and self.state.best_global_step:
            best = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == complete or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        self._meet()
        if self.args.should_save:
            self._note_callbacks()
            self.state.save_to_json(str(partial / STATE_FILE))
            _put_in_place(partial, complete)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(complete))
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self._meet()

    def _note_callbacks(self) -> None:
        """Callbacks that have a state say it, for the next run."""
        kept: Any = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(kept[name], list):
                    kept[name].append(state)
                else:
                    kept[name] = state

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._managed is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self._get_output_dir(None))
        if is_adapted(self.model):
            self.model.save_pretrained(str(folder), is_main_process=self.args.should_save)
        else:
            save_weights(self.engine, folder)
        if not self.args.should_save:
            return
        for holder in (self.processing_class, getattr(self.data_collator, "tokenizer", None)):
            if holder is not None:
                holder.save_pretrained(str(folder))
                break
        torch.save(self.args, folder / ARGUMENTS_FILE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # What PEFT does not train it does not save: the base model is there already.
        self.engine.save(Path(output_dir) / ENGINE_FOLDER, frozen=not is_adapted(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    # Going on

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / ENGINE_FOLDER).is_dir():
            return  # parameters come back with the optimizer's states, once there is an engine
        if (folder / OPTIMIZER_FILE).is_file():
            raise TrainingError(
                f"{folder} is a checkpoint of transformers' own Trainer, whose optimizer lies in a pickle; load the "
                f"model from it with from_pretrained, and begin anew"
            )
        self._load_weights(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (folder := Path(checkpoint) / ENGINE_FOLDER).is_dir():
            return
        self.engine.load(folder)
        schedule = Path(checkpoint) / SCHEDULER_FILE
        if schedule.is_file():
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
        else:
            warnings.warn(f"{checkpoint} has no {SCHEDULER_FILE}: the learning rate begins anew", stacklevel=2)

    def _load_best_model(self) -> None:
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def _load_weights(self, folder: Path) -> None:
        """Parameters alone: the optimizer goes on with its own states. Of a model with adapters, these."""
        self.engine.load_state_dict(saved_weights(folder, self.model), strict=not is_adapted(self.model))


def _put_in_place(partial: Path, complete: Path) -> None:
    """Give a folder that is complete its name, in the place of an older one, when all of it is on the disk."""
    for file in filter(Path.is_file, partial.iterdir()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    fsync_dir(partial)
    before = complete.with_name(f"{PARTIAL}{complete.name}{BEFORE}")
    if complete.is_dir():
        os.replace(complete, before)
    os.replace(partial, complete)
    fsync_dir(complete.parent)
    shutil.rmtree(before, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what a run has left that was killed while it saved; what was to be replaced then gets its name again."""
    for left in folder.glob(f"{PARTIAL}{PREFIX_CHECKPOINT_DIR}-*"):
        complete = folder / left.name.removeprefix(PARTIAL).removesuffix(BEFORE)
        if left.name.endswith(BEFORE) and not complete.exists():
            os.replace(left, complete)
        else:
            shutil.rmtree(left)
