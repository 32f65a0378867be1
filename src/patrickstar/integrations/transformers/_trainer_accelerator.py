"""Accelerator of the Trainer: the engine's, with processes that share batches."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError
from patrickstar.integrations._engine_accelerator import EngineAccelerator, EngineModule
from patrickstar.integrations.transformers._distributed_config import ModelParallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FrozenModule(EngineModule):
    """Module that an engine only reads; its forward runs there without gradients.

    Args:
        module: The module.
        name: Its name in the engine.
        engine: Returns the engine, and creates it at the first call.
    """

    def __init__(self, module: nn.Module, name: str, engine: Callable[[], Engine]) -> None:
        super().__init__(module)
        self.name = name
        self._engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine().call_frozen(self.name, *args, **kwargs)


class TrainerAccelerator(EngineAccelerator):
    """Accelerator that delegates to the engine of a Trainer."""

    no_engine = "there is no engine yet: train(), evaluate() and predict() create it"
    parallelism: ModelParallelism | None
    """Division of model and batches over processes; None if each process has a batch and the whole model."""
    frozen: dict[str, nn.Module]
    """Modules that are only read, by their names in the engine."""
    make_engine: Callable[[], Engine]
    """Returns the engine, and creates it at the first call."""

    @classmethod
    def from_accelerator(
        cls,
        accelerator: Accelerator,
        engine: Engine | None,
        parallelism: ModelParallelism | None,
        make_engine: Callable[[], Engine],
    ) -> "TrainerAccelerator":
        """Convert the Trainer's accelerator in place, since the Trainer already holds bound methods of it."""
        frozen = getattr(accelerator, "frozen", {})
        accelerator.__class__ = cls
        accelerator.engine, accelerator.parallelism = engine, parallelism
        accelerator.frozen, accelerator.make_engine = frozen, make_engine
        converted: TrainerAccelerator = accelerator
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

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the model unchanged: the engine moves parameters, and shards them over processes.

        Args:
            model: The trained model, or one that is only read.
            device_placement: Ignored.
            evaluation_mode: The model is only read: its parameters become frozen ones of the engine, and its forward
                runs there.

        Raises:
            ConfigError: The engine exists, and the model to read is not among its own.
        """
        if not evaluation_mode or isinstance(model, EngineModule):
            return model
        if self.engine is not None:
            raise ConfigError(
                f"a {type(model).__name__} was prepared after the engine was created, which shares its memory among "
                f"models that it knows from the beginning: prepare it before train(), evaluate() and trainer.engine"
            )
        name = f"frozen_{len(self.frozen)}"
        self.frozen[name] = model
        return FrozenModule(model, name, self.make_engine)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> torch.optim.Optimizer:
        """Return the optimizer unchanged: it is the engine's."""
        return optimizer
