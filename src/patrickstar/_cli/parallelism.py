"""Division of a run's batches and model over processes: the options --tp, --ep and --replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from patrickstar._cli.train_options import TrainOptions
from patrickstar._distributed.process_group import Processes
from patrickstar._models.model_source import ModelSource
from patrickstar._models.presets import EXPERT_PRESETS
from patrickstar.errors import ConfigError
from patrickstar.integrations._meshes import Meshes, MeshSizes, meshes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Parallelism:
    """Division of a run's batches and model over its processes.

    Attributes:
        sizes: Sizes of the parallel dimensions.
        meshes: Their device meshes; None if all processes have distinct batches and the whole model.
        data_rank: Number of the batch that this process computes, below `sizes.data`.
    """

    sizes: MeshSizes
    meshes: Meshes | None
    data_rank: int

    @classmethod
    def of(cls, options: TrainOptions, source: ModelSource, world: Processes, device_type: str) -> "Parallelism":
        """Create the meshes that the options name; every process must call this.

        Raises:
            ConfigError: The processes or the model can't be divided so.
        """
        given = [f"--{name} {getattr(options, name)}" for name in PARALLEL_OPTIONS if getattr(options, name) != 1]
        if given and world.size == 1:
            raise ConfigError(
                f"{given[0]} divides the work of several processes, and there is only one: start them with torchrun, "
                f"as in `torchrun --nproc-per-node 4 -m patrickstar train {' '.join(given)}`"
            )
        sizes = MeshSizes(world.size, options.tp, options.ep, options.replicas)
        parallelism = cls(sizes, meshes(sizes, device_type) if given else None, sizes.data_rank(world.rank))
        if options.tp > 1 or options.ep > 1:  # what can't be divided is refused before any other work
            outline = source.on_meta()
            _check_plans(outline, source.name, sizes)
            parallelism.apply(outline)
        return parallelism

    @property
    def mesh(self) -> "DeviceMesh | None":
        """Data-parallel dimensions, for `create_engine`."""
        return None if self.meshes is None else self.meshes.data

    def divide(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
        """Return the model, or a function that builds it, with tensor- and expert-parallel parameters as DTensors."""
        if isinstance(model, nn.Module):
            return self.apply(model)
        return lambda: self.apply(model())

    def apply(self, model: nn.Module) -> nn.Module:
        """Make tensor- and expert-parallel parameters of a model DTensors, in place, and return the model."""
        if self.meshes is not None:
            assert isinstance(model, PreTrainedModel)
            from patrickstar.integrations.transformers import parallelize

            parallelize(model, tp=self.meshes.tp, ep=self.meshes.ep)
        return model


PARALLEL_OPTIONS = ("tp", "ep", "replicas")


def _check_plans(model: PreTrainedModel, name: str, sizes: MeshSizes) -> None:
    """Raise ConfigError if transformers can't divide a model's tensors or experts."""
    kinds = (
        ("tensor", "--tp", sizes.tp, model.tp_plan, "a model folder of a Llama, Qwen or Mistral"),
        ("expert", "--ep", sizes.ep, model.ep_plan, "a model folder of a Mixtral or a Qwen with experts"),
    )
    for kind, option, size, plan, folders in kinds:
        if size > 1 and not plan:
            raise ConfigError(
                f"transformers has no {kind}-parallel plan for a {type(model).__name__} ({name}): leave out "
                f"{option}, or choose a --model with a plan, as the preset {' or '.join(EXPERT_PRESETS)}, or {folders}"
            )
