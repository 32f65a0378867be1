"""accelerate's Accelerator with the engine as backend."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from patrickstar._distributed.process_group import World
from patrickstar._dry_run.precision_choice import settle_precision
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config
from patrickstar.errors import ConfigError, TrainingError
from patrickstar.integrations._engine_accelerator import EngineAccelerator, Managed
from patrickstar.integrations._merged_config import check_precision, merge_config
from patrickstar.integrations._optimizers import convert, move_scheduler
from patrickstar.integrations._weight_files import save_weights
from patrickstar.optim import Optimizer

ENGINE_FOLDER = "patrickstar"
"""Subfolder of a saved state for the engine's checkpoint."""
PREVIOUS_FOLDER = "patrickstar-previous"
"""Subfolder for the checkpoint of an earlier state in the same folder, until the new one is complete."""
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""The engine's precision for each value of `mixed_precision`."""
SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""Kinds of distributed training that manage the model themselves."""


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Wrapper of the engine's optimizer that steps only in the last micro-batch."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    @property
    def step_was_skipped(self) -> bool:
        """True if the last fp16 step was skipped because of non-finite gradients; schedulers then do not step."""
        return self.engine.stats.last.overflows > 0


class Accelerator(EngineAccelerator):
    """`accelerate.Accelerator` for models larger than memory.

    `prepare(model, optimizer, ...)` moves the model into chunks. Precision and device follow the arguments. Loop,
    data loaders, schedulers, metrics and trackers remain accelerate's.

    Args:
        config: Memory budgets (`device_memory`, `host_memory`, `disk`, `chunk_size`; bytes, or text such as "4GiB")
            and settings without an argument here. Default: the memory that the machine has.
        mixed_precision: "no", "bf16" or "fp16". Default: what `accelerate launch` sets, unless it is "no"; then that
            of `config`, which by default chooses what is fast on the machine.
        **options: Keyword arguments of `accelerate.Accelerator`.

    Raises:
        ConfigError: An argument conflicts with the engine's management of the model, such as FSDP or DeepSpeed.
    """

    no_engine = "there is no engine yet: accelerator.prepare(model, optimizer) creates it"

    def __init__(
        self,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        mixed_precision: Any = None,
        **options: Any,
    ) -> None:
        self._user_config = Config.of(config)
        self._precision: Any = _precision(mixed_precision, self._user_config)
        self._chosen = False
        """True if no argument and no option named the precision."""
        # Operators run in the engine's precision, without autocast and without a scaler of accelerate's.
        super().__init__(mixed_precision="no", **options)
        if self.distributed_type in SHARDING:
            raise ConfigError(
                f"accelerate's settings require {self.distributed_type.value}; the engine shards the model data "
                f"itself: start the processes with torchrun, or with an `accelerate config` without it"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ConfigError(
                f"dynamo_backend={self.state.dynamo_plugin.backend.value} is not supported: compile the model's blocks "
                f"first, with block.compile()"
            )
        if self._precision == "auto":  # before there is a model: scripts read `mixed_precision` to load one
            self._user_config = settle_precision(self._user_config, None, self.device, World.find(self.device))
            self._precision, self._chosen = self._user_config.precision, True
        self._engine_has_state = False
        self._save_hook = self.register_save_state_pre_hook(self._save_engine)
        self._load_hook = self.register_load_state_pre_hook(self._load_engine)

    @property
    def mixed_precision(self) -> str:
        """ "no", "bf16" or "fp16": the engine's precision."""
        return {precision: name for name, precision in PRECISIONS.items()}[self._precision]

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects for training; see `accelerate.Accelerator.prepare`.

        A model and its optimizer have to be in one call. The optimizer is one of torch, without steps, or the options
        of one of this package, such as `ps.AdamW(lr=1e-4)`. A scheduler of the optimizer may be in the same call, or
        be created from the optimizer that is returned.

        Args:
            *args: Model, optimizer, data loaders and schedulers, in any order. Others are returned unchanged.
            device_placement: For each object, whether it is moved to the device. Concerns data loaders only.

        Returns:
            The prepared objects in the same order.

        Raises:
            BudgetError, ModelError: As `patrickstar.initialize`.
            ConfigError: There is not one model with one optimizer, or there is an engine already.
        """
        models = [each for each in args if isinstance(each, nn.Module) and not isinstance(each, Managed)]
        optimizers = [each for each in args if isinstance(each, Optimizer) or _is_unprepared(each)]
        if models or optimizers:
            schedulers = [each for each in args if isinstance(each, LRScheduler)]
            engine = self._manage(models, optimizers, schedulers)
            replaced = {id(models[0]): Managed(engine), id(optimizers[0]): engine.optimizer}
            args = tuple(replaced.get(id(each), each) for each in args)
        return super().prepare(*args, device_placement=device_placement)

    def _manage(self, models: list[nn.Module], optimizers: list[Any], schedulers: list[LRScheduler]) -> Engine:
        if self.engine is not None:
            raise ConfigError(
                "this Accelerator has prepared a model already, and its backward and checkpoints are those of one "
                "engine: call free_memory() first, or use ps.initialize for the other model"
            )
        if len(models) != 1 or len(optimizers) != 1:
            raise ConfigError(
                f"prepare() got {len(models)} models and {len(optimizers)} optimizers: pass one model and its "
                f"optimizer in one call. A model that is not trained need not be prepared"
            )
        model, optimizer = models[0], optimizers[0]
        options = optimizer if isinstance(optimizer, Optimizer) else convert(optimizer, model)
        engine = self.make_engine(model, self._merged(options))
        if hasattr(model, "save_pretrained"):
            # Imported here because only models of transformers need it.
            from patrickstar.integrations.transformers._saved_weights import make_savable

            make_savable(engine)
        self.engine = engine
        for scheduler in schedulers:
            if scheduler.optimizer is optimizer:
                move_scheduler(scheduler, optimizer, engine.optimizer)
        return engine

    def make_engine(self, model: nn.Module, config: Config) -> Engine:
        """Create the engine. Override this method to customize the engine.

        Args:
            model: The model to train.
            config: The configuration that results from the arguments, the optimizer and the user's `config`.

        Returns:
            The engine that manages the model.

        Raises:
            BudgetError, ConfigError, ModelError: As `patrickstar.initialize`.
        """
        return initialize(model, config)[0]

    def _merged(self, optimizer: Optimizer) -> Config:
        """Return the user's configuration with the precision, the device and the optimizer."""
        config = self._user_config
        if "optimizer" in config.model_fields_set:
            raise ConfigError(
                "ps.Config(optimizer=...) and an optimizer in prepare() are two: pass the options to prepare(), as in "
                "prepare(model, ps.AdamW(lr=1e-4))"
            )
        selected = f"the Accelerator selects the device {str(self.device)!r} (cpu=...)"
        merged = merge_config(config, self._precision, self.device, selected, optimizer)
        return merged.with_precision(self._precision) if self._chosen else merged

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Register the model that `prepare` has given to the engine. Raises ConfigError for any other one."""
        if not isinstance(model, Managed):
            raise ConfigError("a model can't be prepared without its optimizer: call prepare(model, optimizer)")
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Wrap the engine's optimizer. Raises ConfigError for any other one."""
        if isinstance(optimizer, EngineOptimizer):
            return optimizer
        if self.engine is None or optimizer is not self.engine.optimizer:
            raise ConfigError("an optimizer can't be prepared without its model: call prepare(model, optimizer)")
        prepared = EngineOptimizer(self.engine)
        self._optimizers.append(prepared)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine, after which parameters are ordinary tensors on the host, and release all objects."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None
        return super().free_memory(*objects)

    # Training

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward of the loss, divided by the number of micro-batches, through the engine."""
        super().backward(loss / self.gradient_accumulation_steps, **options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the engine clips gradients that are not scaled."""

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise TrainingError: chunks store gradients until they are reduced."""
        raise TrainingError("clip_grad_value_ is not supported: use clip_grad_norm_, which clips by the 2-norm")

    # Processes: one that waits in a collective of accelerate can't serve the others' requests for its shards.

    def wait_for_everyone(self) -> None:
        """Wait for all processes, and serve their requests meanwhile."""
        self.synchronize()
        super().wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all processes; see `accelerate.Accelerator.gather`."""
        self.synchronize()
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of all batches; see `accelerate.Accelerator.gather_for_metrics`."""
        self.synchronize()
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors of all processes; see `accelerate.Accelerator.reduce`."""
        self.synchronize()
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the size of the largest; see `accelerate.Accelerator.pad_across_processes`."""
        self.synchronize()
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    # Saving and loading

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers in full precision, on the host. Every process must call it."""
        if self.engine is None or self.unwrap_model(model) is not self.engine.module:
            state: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
            return state
        return {} if self._engine_has_state else self.engine.state_dict()

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Save the weights in full precision. Every process must call it.

        Args:
            model: Model.
            save_directory: Folder; weights of an earlier call are replaced.
            max_shard_size: Largest file, in bytes or as a size such as "5GB".
            safe_serialization: Write safetensors, one tensor after the other. False pickles a copy of the whole model.
        """
        if self.engine is None or not safe_serialization or self.unwrap_model(model) is not self.engine.module:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        save_weights(self.engine, Path(save_directory), max_shard_bytes=max_shard_size)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save model, optimizer, schedulers, samplers and random generators. Every process must call it.

        Args:
            output_dir: Folder; a state that it holds is replaced. The engine's checkpoint is in its subfolder
                `patrickstar`.
            safe_serialization: Has no effect: the engine's checkpoint is always safetensors.
            **options: Have no effect.

        Returns:
            The folder.

        Raises:
            CheckpointError: The engine's checkpoint can't be written.
        """
        self._save_model_state_pre_hook.move_to_end(self._save_hook.id)
        with self._engine_saves():
            return super().save_state(output_dir, safe_serialization, **options)

    @contextmanager
    def _engine_saves(self) -> Iterator[None]:
        """Keep accelerate from copying parameters and optimizer states to memory, and from loading them."""
        optimizers = list(self._optimizers)
        self._optimizers.clear()
        self._engine_has_state = True
        try:
            yield
        finally:
            self._optimizers.extend(optimizers)
            self._engine_has_state = False

    def _save_engine(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if self.engine is not None:
            path, previous = Path(folder) / ENGINE_FOLDER, Path(folder) / PREVIOUS_FOLDER
            writes = self.engine.world.rank == 0
            if writes and path.exists():
                shutil.rmtree(previous, ignore_errors=True)
                path.rename(previous)
            self.synchronize()
            self.engine.save(path)
            if writes:
                shutil.rmtree(previous, ignore_errors=True)
        weights.clear()

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Load what `save_state` has saved; training continues with the same bits. Every process must call it.

        Args:
            input_dir: Folder. Default: the newest of automatic checkpoint naming.
            load_kwargs: Options of `torch.load` for samplers and random generators.
            **options: Have no effect on the engine's checkpoint.

        Raises:
            CheckpointError: The engine's checkpoint is missing, damaged or of another model.
        """
        self._load_model_state_pre_hook.move_to_end(self._load_hook.id)
        with self._engine_saves():
            super().load_state(input_dir, load_kwargs, **options)

    def _load_engine(self, models: list[nn.Module], folder: str) -> None:
        if self.engine is not None:
            path, previous = Path(folder) / ENGINE_FOLDER, Path(folder) / PREVIOUS_FOLDER
            self.engine.load(previous if previous.is_dir() and not path.is_dir() else path)
        models.clear()


def _is_unprepared(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) and not isinstance(value, EngineOptimizer)


def _precision(mixed_precision: Any, config: Config) -> str:
    """Return the precision that is asked for. Raises ConfigError if it is not supported, or contradicts `config`."""
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if mixed_precision is None else mixed_precision
    given = str(getattr(given, "value", given))
    if mixed_precision is None and given == "no":  # `accelerate launch` sets it without being asked
        return config.precision
    if given not in PRECISIONS:
        raise ConfigError(f"mixed_precision={given!r} is not supported: use {', '.join(map(repr, PRECISIONS))}")
    check_precision(config, PRECISIONS[given], f"mixed_precision={given!r} selects")
    return PRECISIONS[given]
