"""Move the parameters of a user's model into chunks, without a second copy of any parameter."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from patrickstar._autograd.interceptor import Interceptor
from patrickstar._autograd.module_hooks import ModuleHooks
from patrickstar._autograd.recomputed_layers import find_layers, layers_of, recompute
from patrickstar._autograd.tiled_rows import tile
from patrickstar._autograd.uncomputed_logits import tiled_output
from patrickstar._checkpoint.module_save_pretrained import save_in_full_precision
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._distributed.param_sharding import ParamSharding, local_part
from patrickstar._engine.shared_memory import check_memory
from patrickstar._hardware.sigint_gate import interruptible
from patrickstar._layout.chunk_mapping import ChunkSpec, Layout, ParamSpec, build_layout
from patrickstar._layout.chunk_size_search import search_layout
from patrickstar._layout.schema import NODE16, PARAM16, PARAM32, SHARD16, ParamSchema, schema_for
from patrickstar._layout.shard_group import largest_group
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.param_values import replace_data
from patrickstar._params.precision import compute_dtypes
from patrickstar._schedule.coordination import Request
from patrickstar._schedule.placement import HOST, ChunkTiers, Tier
from patrickstar._tiers.chunk import Chunk, Region
from patrickstar.config import Config, Delayed, LockFree
from patrickstar.errors import ConfigError, ModelError

WeightSource = Callable[[str], torch.Tensor]
"""Returns the value of a parameter by its name, for parameters that were created on the meta device."""


@runtime_checkable
class ShardedWeightSource(Protocol):
    """WeightSource that can also return part of a value, so that no process reads the shards of others."""

    def __call__(self, name: str) -> torch.Tensor:
        """Return the value of a parameter."""

    def part(self, name: str, first: int, numel: int) -> torch.Tensor:
        """Return `numel` elements of the flattened, contiguous value, starting at element `first`."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_model(module: nn.Module, device: torch.device) -> None:
    """Raise ModelError for a parameter or buffer that cannot be managed."""
    if next(module.parameters(), None) is None:
        raise ModelError(f"{type(module).__name__} has no parameters to train")
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name!r} has no shape yet; run one batch through the lazy module first")
        if param.layout is not torch.strided:
            raise ModelError(f"parameter {name!r} has layout {param.layout}; chunks store dense parameters only")
        if hasattr(param, "_managed_params"):
            raise ModelError(f"parameter {name!r} already belongs to an engine; close that engine first")
        if not param.is_leaf:
            raise ModelError(f"parameter {name!r} is computed from other tensors; initialize the engine before that")
    for name, buffer in module.named_buffers():
        if buffer.is_meta and device.type != "meta":
            raise ModelError(
                f"buffer {name!r} is on the meta device, and `weights` provides parameters only; if the function that "
                f"builds the model caches tensors between its calls, pass the model itself"
            )
    for prefix, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ModelError(
                f"parameter {prefix + '.weight'!r} asks for sparse gradients, which chunks cannot store; "
                f"build the embedding with sparse=False"
            )
    check_memory(module)


def lookup_weights(module: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of weights of an nn.Embedding that no other module has, and of those that others have."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for prefix, child in module.named_modules():
        for name, param in child.named_parameters(prefix=prefix, recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((child, name))
    kinds: tuple[set[str], set[str]] = set(), set()
    for uses in owners.values():
        if any(type(owner) is nn.Embedding and owner.max_norm is None for owner, _ in uses):
            kinds[len(uses) > 1].add(uses[0][1])
    return kinds


def param_specs(
    module: nn.Module, model: nn.Module, config: Config, shardings: Mapping[str, ParamSharding] | None = None
) -> list[ParamSpec]:
    """Describe the parameters for the layout, in creation order. Embeddings get chunks that may stay on the host.

    Args:
        module: All managed modules.
        model: The trained one, whose parameters the optimizer updates.
        shardings: With several processes, which of them hold and share each parameter.

    Raises:
        ConfigError: The optimizer needs whole parameters, or all of them, and processes hold parts; or the model has no
            output layer for a tiled loss, or no layers that can be recomputed.
    """
    if config.tiled_loss:  # refused before memory is used
        tiled_output(model)
    if config.tiled_mlp:
        list(tile(model))
    if config.activation_checkpointing not in (None, "auto"):
        find_layers(model)
    optimizer = config.optimizer
    if shardings and optimizer.updates_together:
        raise ConfigError(
            f"{optimizer.name} updates all parameters together, and with several processes each has only a part of "
            f"them: use one process, or an optimizer such as ps.AdamW"
        )
    if shardings and config.updates_in_backward:
        raise ConfigError(
            "update=ps.InBackward() takes one process: with several, leave it out; their updates begin during backward "
            "by themselves"
        )
    lists, whole = optimizer.lists_by_param(model), optimizer.whole_params(model)
    dtypes = compute_dtypes(module, config.compute_dtype, config.keep_fp32)
    embeddings, _ = lookup_weights(module)
    specs = []
    for name, param in module.named_parameters():
        sharding = shardings[name] if shardings else None
        schema = _schema(dtypes[name], param.requires_grad, config, lists.get(param), sharding is not None)
        numel, group = (param.numel(), None) if sharding is None else (sharding.numel, sharding.group)
        if sharding is not None and sharding.parts and param in whole and param.requires_grad:
            raise ConfigError(
                f"{optimizer.name} updates whole parameters, and processes hold parts of {name!r} "
                f"{tuple(param.shape)}, which the mesh shards: use an element-wise optimizer such as ps.AdamW for it"
            )
        specs.append(ParamSpec(name, numel, schema, name in embeddings, group, param in whole))
    return specs


def _schema(
    dtype: torch.dtype, trained: bool, config: Config, states: tuple[str, ...] | None, shared: bool
) -> ParamSchema:
    """Return the schema of a parameter; `states`: its chunk lists of states if they are not those of most."""
    update = config.late_update
    return schema_for(
        dtype_name(dtype),
        trained,
        config.optimizer.states if states is None else states,
        state_dtypes=config.optimizer.state_dtypes,
        split=config.splits_masters,
        delayed=isinstance(update, Delayed),
        buffered=update.gradient_dtype if isinstance(update, LockFree) else None,
        summed=config.reduce_dtype if shared and update is not None else None,
    )


def make_layout(params: list[ParamSpec], config: Config, device_budget_bytes: int) -> Layout:
    """Return the layout with the configured chunk size, or with the size that wastes the fewest bytes.

    Chunks are not grouped if a chunk group of the configured size exceeds half of the device budget.
    """
    if config.chunk_size == "auto":
        return search_layout(params, device_budget_bytes, config.disk is not None)
    itemsize = max(param.schema.compute.itemsize for param in params)
    layout = build_layout(params, max(1, int(config.chunk_size) // itemsize))
    shared = max((chunk.compute_bytes for chunk in layout.chunks if not chunk.private), default=0)
    if largest_group(param.group for param in params) > 1 and 2 * shared > device_budget_bytes:
        return build_layout(params, layout.chunk_numel, grouped=False)
    return layout


def params_used_together(module: nn.Module) -> list[set[str]]:
    """Return the parameter names that one operator is likely to read at once: those of each module.

    Attention also reads its projection's parameters. Exact sets are known only when operators run.
    """
    names = {param: name for name, param in module.named_parameters()}
    return [
        {names[param] for param in child.parameters(recurse=isinstance(child, nn.MultiheadAttention))}
        for child in module.modules()
    ]


def create_chunks(spec: ChunkSpec, tiers: ChunkTiers, manager: ChunkManager) -> Chunk:
    """Create all chunks of one index, filled with zeros, or none if that fails."""
    created = []
    try:
        if spec.sharded:
            compute = spec.schema.compute
            created.append(manager.new_shared_chunk(PARAM16, spec.index, spec.numel, compute.dtype))
            tier, nbytes, host = Tier.HOST, spec.nbytes(compute.itemsize), manager.host_tier
            if manager.disk_tier is not None:
                host.set_aside_bytes = max(host.set_aside_bytes, nbytes)
                tier = Tier.HOST if host.has_room(nbytes) else Tier.DISK
            created.append(manager.new_chunk(SHARD16, spec.index, spec.own_numel, compute.dtype, tier))
        if spec.group is not None and spec.group.replicas > 1:
            created.append(manager.new_chunk(NODE16, spec.index, spec.node_numel, spec.schema.compute.dtype, Tier.HOST))
        for item in spec.schema.optimizer_lists if spec.sharded else spec.schema.lists:
            tier = tiers.compute if item.kind == PARAM16 else tiers.optimizer
            created.append(manager.new_chunk(item.kind, spec.index, spec.own_numel, item.dtype, tier))
        for item in spec.schema.buffers:
            created.append(manager.new_chunk(item.kind, spec.index, spec.own_numel, item.dtype, Tier.HOST))
    except BaseException:
        for chunk in created:
            manager.remove(chunk)
        raise
    return created[0]


def move_params(
    module: nn.Module,
    layout: Layout,
    placement: Mapping[int, ChunkTiers],
    params: Iterable[ParamSpec],
    data: ModelData,
    interceptor: Interceptor,
    weights: WeightSource | None,
    shardings: Mapping[str, ParamSharding],
) -> None:
    """Move the parameters into their chunks one at a time, freeing the old memory of each before the next."""
    schemas = {param.name: param.schema for param in params}
    # No process has all of a sharded weight on its host.
    is_sharded = any(chunk.sharded for chunk in layout.chunks)
    embeddings, tied = (set[str](), set[str]()) if is_sharded else lookup_weights(module)
    by_name = dict(module.named_parameters())
    creation = {name: position for position, name in enumerate(by_name)}
    manager = data.manager
    for spec in layout.chunks:
        chunk = create_chunks(spec, placement[spec.index], manager)
        for name in spec.params:
            param = by_name[name]
            location, first = layout.local_location(name)
            part = local_part(param)
            # Strides are preserved: kernels sum in memory order, which determines the bits of the result.
            strides = torch.empty_like(part, device="meta").stride()
            region = Region(layout.locations[name].offset, tuple(part.shape), strides)
            own = manager[SHARD16, spec.index] if spec.sharded else chunk
            managed = ManagedParam(
                *(name, param, schemas[name], location, chunk, region, own, first, name in embeddings | tied),
                tied=name in tied,
                whole=None if part is param else Region(0, tuple(param.shape), param.stride()),
                sharding=shardings.get(name),
            )
            with interruptible():
                flat = _own_elements(managed, weights)
            managed.given_dtype = flat.dtype
            for kind in (own.kind, PARAM32) if managed.schema.trained else (own.kind,):
                for where, part in data.shards.parts(managed, kind, write=True):  # both may be on disk by now
                    part.copy_(flat[where])
            if param.is_meta or param.device.type != data.manager.device.type or param.dtype != chunk.dtype:
                replace_data(param, torch.empty(0, dtype=chunk.dtype, device=chunk.compute_device))
            del flat
            data.shards.add(managed)
            interceptor.intercept(managed)
    data.shards.managed_params.sort(key=lambda managed: creation[managed.name])


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move all buffers of a model to a device."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)


def _own_elements(managed: ManagedParam, weights: WeightSource | None) -> torch.Tensor:
    """Return this process's shard of a parameter's value, flattened in the memory order of the parameter."""
    value = local_part(managed.param).data
    if value.is_meta:
        if weights is None:
            raise ModelError(
                f"parameter {managed.name!r} is on the meta device; pass its value to ps.initialize with `weights`"
            )
        is_row_major = managed.row_major and not managed.parts
        if isinstance(weights, ShardedWeightSource) and (is_row_major or not managed.location.numel):
            return weights.part(managed.name, managed.shard_start, managed.location.numel)
        value = weights(managed.name)
        if value.shape != managed.full_shape:
            raise ModelError(
                f"`weights` returned shape {tuple(value.shape)} for parameter {managed.name!r} of shape "
                f"{managed.full_shape}"
            )
        value = managed.local(value)
    return managed.flattened(value)[managed.shard_slice]


def replace_methods(module: nn.Module, hooks: ModuleHooks, managed_params: list[ManagedParam], config: Config) -> None:
    """Let a model save full precision, leave its logits to a tiled loss, and recompute a share of its layers."""
    if (method := save_in_full_precision(module, managed_params)) is not None:
        hooks.replace_attribute(module, "save_pretrained", method)
    if config.tiled_loss:
        output = tiled_output(module)
        hooks.replace_attribute(output.layer, "forward", output)
    if config.tiled_mlp:
        for tiled in tile(module):
            hooks.replace_attribute(tiled.module, "forward", tiled)
    if config.activation_checkpointing == "auto":
        if layers_of(module):  # whatever is chosen for them, they use no cache
            recompute(module, 0.0, hooks, caches=False)
    elif config.activation_checkpointing is not None:
        recompute(module, config.activation_checkpointing, hooks)


def unfreeze(
    managed_params: list[ManagedParam],
    layout: Layout,
    data: ModelData,
    interceptor: Interceptor,
    config: Config,
    model: nn.Module,
) -> Layout:
    """Move parameters that are no longer frozen to new chunks at the end, with the lists of trained parameters."""
    lists, whole = config.optimizer.lists_by_param(model), config.optimizer.whole_params(model)
    specs = [
        ParamSpec(
            managed.name,
            managed.layout_numel,
            _schema(managed.chunk.dtype, True, config, lists.get(managed.param), managed.sharding is not None),
            managed.embedding and not managed.tied,
            group=None if managed.sharding is None else managed.sharding.group,
            whole=managed.param in whole,
        )
        for managed in managed_params
    ]
    sizes = {managed.name: managed.numel for managed in managed_params}
    extended = layout.extended(specs).with_sizes(sizes)
    for chunk in extended.chunks:
        if (PARAM16, chunk.index) not in data.manager.chunks:
            on_disk = data.manager.disk_tier is not None
            create_chunks(chunk, ChunkTiers(Tier.DEVICE, Tier.DISK) if on_disk else HOST, data.manager)
    if data.sharing.comm is not None:
        data.sharing.comm.transports.register(extended.chunks)
    for managed, spec in zip(managed_params, specs, strict=True):
        data.sharing.ensure_in_memory(managed)
        value = managed.payload().clone()
        data.shards.by_chunk[managed.chunk.index].remove(managed)
        managed.location, managed.shard_start = extended.local_location(managed.name)
        managed.schema = spec.schema
        managed.chunk, managed.device_view = data.manager[PARAM16, managed.location.chunk], None
        managed.shard_chunk = data.manager[SHARD16, managed.location.chunk] if managed.chunk.sharded else managed.chunk
        managed.region = replace(managed.region, offset=extended.locations[managed.name].offset)
        data.shards.by_chunk.setdefault(managed.location.chunk, []).append(managed)
        data.shards.ensure_local(managed)
        flat = managed.flattened(value)[managed.shard_slice]
        managed.flat(managed.shard_chunk).copy_(flat)
        data.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)
        for where, part in data.shards.parts(managed, PARAM32, write=True):
            part.copy_(flat[where])
        data.shards.set_param_views([managed.chunk])
        interceptor.gradient_hooks.register(managed)
    data.sharing.synchronize_processes(Request.STATE)  # other processes may still fetch the old chunks
    for old in [index for index, remaining in data.shards.by_chunk.items() if not remaining]:
        for kind in (PARAM16, SHARD16, NODE16):
            if (kind, old) in data.manager.chunks:
                data.manager.remove(data.manager[kind, old])
        del data.shards.by_chunk[old]
    return extended
