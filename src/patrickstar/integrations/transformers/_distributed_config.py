"""Parallelism of a model as transformers' `DistributedConfig` asks for."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig

from patrickstar.errors import ConfigError
from patrickstar.integrations._meshes import Meshes, MeshSizes, meshes
from patrickstar.integrations._on_first_use import require
from patrickstar.integrations.transformers import PLANS
from patrickstar.integrations.transformers._saved_weights import is_adapted


@dataclass(frozen=True)
class ModelParallelism:
    """Division of a model and its batches over processes, as a `DistributedConfig` asks for.

    Attributes:
        config: The configuration.
        sizes: Sizes of the parallel dimensions.
        meshes: Their device meshes.
        data_rank: Number of the batch that this process computes, below `sizes.data`.
    """

    config: DistributedConfig
    sizes: MeshSizes
    meshes: Meshes
    data_rank: int

    @classmethod
    def of(cls, model: Any, rank: int, world: int, device_type: str) -> "ModelParallelism | None":
        """Return the parallelism that `model.config.distributed_config` asks for, None if there is none.

        It creates the meshes, so every process must call this.

        Raises:
            ConfigError: The configuration can't be used, or not for this model.
        """
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ConfigError(
                "from_pretrained(distributed_config=...) has sharded the model, and the engine does so itself: load it "
                "without distributed_config, and set model.config.distributed_config before you create the Trainer"
            )
        config = distributed_config(model)
        if config is None:
            return None
        sizes = mesh_sizes(config, world)
        if world == 1:
            return None
        if is_adapted(model):
            raise ConfigError(
                "model.config.distributed_config can't be used with adapters of PEFT, whose layers no plan divides: "
                "merge the adapters, or set it to None; the engine then shards the model over all processes"
            )
        if (method := getattr(model, "quantization_method", None)) is not None:
            raise ConfigError(
                f"model.config.distributed_config can't be used with weights quantized by {method}: set it to None; "
                f"the engine then shards the model over all processes"
            )
        return cls(config, sizes, meshes(sizes, device_type), sizes.data_rank(rank))

    def divide(self, model: Any) -> None:
        """Make parameters of the model DTensors by its plans, in place.

        Its `config` no longer has the `DistributedConfig`: transformers would take it for a model under FSDP2.
        """
        from patrickstar.integrations.transformers import parallelize

        plans = [plan if isinstance(plan, dict) else None for plan in (self.config.tp_plan, self.config.ep_plan)]
        parallelize(model, tp=self.meshes.tp, ep=self.meshes.ep, tp_plan=plans[0], ep_plan=plans[1])
        model.config.distributed_config = None


def distributed_config(model: nn.Module) -> DistributedConfig | None:
    """Return `model.config.distributed_config`, None if it is not set."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return DistributedConfig.from_dict(config) if isinstance(config, dict) else config


def mesh_sizes(config: DistributedConfig, world: int) -> MeshSizes:
    """Return the sizes of the parallel dimensions that transformers' configuration asks for.

    Args:
        config: The configuration. `fsdp_size` is the number of processes of a replica with distinct batches.
        world: Number of processes.

    Raises:
        ConfigError: The configuration asks for another number of processes, or for something that the engine does in
            another way or not at all.
        MissingPackageError: transformers is too old for plans.
    """
    require("model.config.distributed_config", PLANS)
    from patrickstar.integrations.transformers._parallelize import EXCHANGE

    # transformers replaces None by 1 in all of them.
    replicas, shards, tp, ep, pp = (
        size or 1
        for size in (config.dp_replicate_size, config.fsdp_size, config.tp_size, config.ep_size, config.pp_size)
    )
    refused = {
        "pp_size": (pp > 1, "pipeline parallelism is not supported"),
        "enable_sequence_parallel": (config.enable_sequence_parallel, "transformers does not implement it"),
        "fsdp_plan": (config.fsdp_plan is not None, "chunks replace FSDP2, and need no plan"),
        "fsdp_cpu_offload": (config.fsdp_cpu_offload, "chunks replace FSDP2: set device_memory in ps.Config"),
        "fsdp_mixed_precision": (config.fsdp_mixed_precision, "set precision in ps.Config, or bf16 of the Trainer"),
        "ep_implementation": (
            config.ep_implementation not in ("auto", EXCHANGE),
            f"tokens reach their experts by {EXCHANGE!r}",
        ),
    }
    for name, (conflicts, reason) in refused.items():
        if conflicts:
            raise ConfigError(f"DistributedConfig({name}={getattr(config, name)!r}) can't be used: {reason}")
    if replicas * shards * tp != world:
        fitting = world // (replicas * tp)
        raise ConfigError(
            f"DistributedConfig is for {replicas * shards * tp} processes (dp_replicate_size={replicas} x "
            f"fsdp_size={shards} x tp_size={tp}), and there are {world}"
            + (f": set fsdp_size={fitting}" if replicas * fitting * tp == world else "")
        )
    return MeshSizes(world, tp, ep, replicas)
