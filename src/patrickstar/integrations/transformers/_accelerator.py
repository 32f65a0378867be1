"""Module and Accelerator that route the Trainer's calls to the engine."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError, TrainingError
from patrickstar.integrations.transformers._distributed_config import ModelParallelism
from patrickstar.integrations.transformers._saved_weights import make_savable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Uncast:
    """Wrapper that protects a tensor from the engine's cast of inputs."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value.value if isinstance(value, _Uncast) else value for name, value in kwargs.items()}


class Managed(nn.Module):
    """Module whose forward calls the engine; other attributes are those of the model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine
        # Loss functions divide by num_items_in_batch; cast to 16 bits, 1023 tokens would become 1024.
        self.module.register_forward_pre_hook(_unpack, with_kwargs=True)
        make_savable(engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(items := kwargs.get("num_items_in_batch"), torch.Tensor):
            kwargs["num_items_in_batch"] = _Uncast(items)
        return self.engine(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.optimizer.zero_grad()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class EngineAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerator that delegates model, gradients and optimizer to the engine.

    Data sharding, gathering of metrics and counting of micro-batches remain accelerate's.
    """

    engine: Engine | None
    parallelism: ModelParallelism | None
    """Division of model and batches over processes; None if each process has a batch and the whole model."""

    @classmethod
    def from_accelerator(
        cls, accelerator: Accelerator, engine: Engine | None, parallelism: ModelParallelism | None
    ) -> "EngineAccelerator":
        """Convert the Trainer's accelerator in place, since the Trainer already holds bound methods of it."""
        accelerator.__class__ = cls
        accelerator.engine, accelerator.parallelism = engine, parallelism
        converted: EngineAccelerator = accelerator
        return converted

    @property
    def torch_device_mesh(self) -> "DeviceMesh | None":
        """Mesh by which data loaders give the processes of a `tp` dimension the same batches."""
        return None if self.parallelism is None else self.parallelism.meshes.dense

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Shard the batches of a data loader; processes that share a batch get the same one.

        Raises:
            ConfigError: Processes share batches, and the first process would dispatch them.
        """
        if self.parallelism is not None and self.parallelism.sizes.tp > 1:
            dispatches = self.dispatch_batches
            if dispatches is None:
                dispatches = isinstance(data_loader.dataset, IterableDataset)
            if dispatches:
                raise ConfigError(
                    "accelerate can't dispatch batches from rank 0 beside tensor parallelism, as it does for an "
                    "IterableDataset: set TrainingArguments(accelerator_config={'dispatch_batches': False}), and let "
                    "each process read the dataset"
                )
            seed = data_loader.worker_init_fn
            if isinstance(seed, partial) and "rank" in seed.keywords:
                # Workers that read the same batch transform it with the same random numbers.
                data_loader.worker_init_fn = partial(seed.func, **seed.keywords | {"rank": self.parallelism.data_rank})
        return super().prepare_data_loader(data_loader, *args, **options)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of all batches: those of the first of the processes that share one. See accelerate's method.

        Args:
            input_data: Tensors or objects of this process; tensors are joined along the first dimension.
            use_gather_object: Gather tensors as objects, which may differ in size.
        """
        tp = 1 if self.parallelism is None else self.parallelism.sizes.tp
        if tp == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(input_data)):
            return super().gather_for_metrics(input_data if self.process_index % tp == 0 else [], True)
        state = self.gradient_state
        # At the end of the data samples were repeated, so that all processes have as many; -1: of unknown number.
        count = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def distinct(gathered: torch.Tensor) -> torch.Tensor:
            whole: torch.Tensor = gathered.unflatten(0, (self.num_processes, -1))[::tp].flatten(0, 1)
            return whole[:count]

        return pytree.tree_map_only(torch.Tensor, distinct, self.gather(input_data))

    @property
    def _active_engine(self) -> Engine:
        if self.engine is None:
            raise TrainingError("there is no engine yet: train(), evaluate() and predict() create it")
        return self.engine

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        inner: nn.Module = super().unwrap_model(model.module if isinstance(model, Managed) else model, *args, **options)
        return inner

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> torch.optim.Optimizer:
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a null context: `backward` decides whether gradients are averaged."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward through the engine, which averages over processes in the last one before a step."""
        every_batch = self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        self._active_engine.backward(loss, accumulate=not (self.sync_gradients or every_batch), **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients in the next step; return their 2-norm before. Raises TrainingError for other norms."""
        if norm_type != 2:
            raise TrainingError(f"norm_type={norm_type} is not supported: gradients are clipped by their 2-norm")
        return self._active_engine.clip_grad_norm_(max_norm)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last fp16 step was skipped because of non-finite gradients."""
        return self._active_engine.stats.last.overflows > 0
