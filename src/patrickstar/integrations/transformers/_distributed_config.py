"""Reading of transformers' `DistributedConfig`."""

from transformers.distributed.configuration_utils import DistributedConfig

from patrickstar.errors import ConfigError
from patrickstar.integrations._meshes import MeshSizes
from patrickstar.integrations.transformers._parallelize import EXCHANGE


def mesh_sizes(config: DistributedConfig, world: int) -> MeshSizes:
    """Return the sizes of the parallel dimensions that transformers' configuration asks for.

    Args:
        config: The configuration. `fsdp_size` is the number of processes of a replica with distinct batches.
        world: Number of processes.

    Raises:
        ConfigError: The configuration asks for another number of processes, or for something that the engine does in
            another way or not at all.
    """
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
