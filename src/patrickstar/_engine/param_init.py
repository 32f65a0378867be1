"""From a user's model to slots in chunks, without a second copy of any parameter."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from patrickstar._autograd.interceptor import Interceptor
from patrickstar._layout.chunk_mapping import ChunkSpec, Layout, ParamSpec, build_layout
from patrickstar._layout.chunk_size_search import search_layout
from patrickstar._layout.schema import PARAM16, PARAM32, SHARD16, schema_for
from patrickstar._memory.chunk import Chunk, Region
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.precision import compute_dtypes
from patrickstar._schedule.coordination import Request
from patrickstar._schedule.placement import HOST, ChunkTiers, Tier
from patrickstar.config import Config
from patrickstar.errors import ModelError

WeightSource = Callable[[str], torch.Tensor]
"""Gives a parameter's value by its name, for parameters that were built on the meta device."""


@runtime_checkable
class ShardedWeightSource(Protocol):
    """A WeightSource that can also give a part of a value, so that no process reads what others own."""

    def __call__(self, name: str) -> torch.Tensor:
        """All of a parameter's value."""
        ...

    def part(self, name: str, first: int, numel: int) -> torch.Tensor:
        """Its elements from `first` on, `numel` of them, in a row as they lie in a contiguous tensor of its shape."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """The name that the layout knows a dtype by."""
    return str(dtype).removeprefix("torch.")


def check_model(module: nn.Module, device: torch.device) -> None:
    """Raise ModelError for what can't be trained here, naming the parameter."""
    if next(module.parameters(), None) is None:
        raise ModelError(f"{type(module).__name__} has no parameters: there is nothing to train")
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name!r} has no shape yet; run one batch through the lazy module first")
        if param.layout is not torch.strided:
            raise ModelError(f"parameter {name!r} has layout {param.layout}; chunks hold dense parameters only")
        if hasattr(param, "_managed_params"):
            raise ModelError(f"parameter {name!r} already belongs to an engine; close that one first")
        if not param.is_leaf:
            raise ModelError(f"parameter {name!r} is computed from others; give the engine the model before that")
    for name, buffer in module.named_buffers():
        if buffer.is_meta and device.type != "meta":
            raise ModelError(f"buffer {name!r} is on the meta device; only parameters can be filled from `weights`")
    for prefix, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ModelError(
                f"parameter {prefix + '.weight'!r} asks for sparse gradients, which chunks can't take; "
                f"build the embedding with sparse=False"
            )


def lookup_weights(module: nn.Module) -> set[str]:
    """Names of weights that only embedding lookups read: one owner, which is an nn.Embedding."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for prefix, child in module.named_modules():
        for name, param in child.named_parameters(prefix=prefix, recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((child, name))
    return {
        uses[0][1]
        for uses in owners.values()
        if len(uses) == 1 and type(uses[0][0]) is nn.Embedding and uses[0][0].max_norm is None
    }


def param_specs(module: nn.Module, config: Config) -> list[ParamSpec]:
    """The model as the layout sees it, in creation order. Embeddings get chunks of their own, which may stay away."""
    dtypes = compute_dtypes(module, config.compute_dtype)
    alone, states = lookup_weights(module), config.optimizer.states
    return [
        ParamSpec(name, param.numel(), schema_for(dtype_name(dtypes[name]), param.requires_grad, states), name in alone)
        for name, param in module.named_parameters()
    ]


def make_layout(
    params: list[ParamSpec], config: Config, device_budget_bytes: int, nproc: int = 1, rank: int = 0
) -> Layout:
    """The layout with the chunk size asked for, or the one that wastes least.

    Where a group of chunks of the size asked for is more than half the device, chunks are not grouped.
    """
    if config.chunk_size == "auto":
        return search_layout(params, device_budget_bytes, config.disk is not None, nproc, rank)
    itemsize = max(param.schema.compute.itemsize for param in params)
    layout = build_layout(params, max(1, int(config.chunk_size) // itemsize), nproc, rank)
    shared = max((chunk.compute_bytes for chunk in layout.chunks if not chunk.private), default=0)
    if nproc > 1 and 2 * shared > device_budget_bytes:
        return build_layout(params, layout.chunk_numel, nproc, rank, grouped=False)
    return layout


def used_together(module: nn.Module) -> list[set[str]]:
    """Names of parameters that one operator is likely to read at once: those that a module owns itself.

    Attention reads its projection's too. What an operator really reads shows when it runs.
    """
    names = {param: name for name, param in module.named_parameters()}
    return [
        {names[param] for param in child.parameters(recurse=isinstance(child, nn.MultiheadAttention))}
        for child in module.modules()
    ]


def create_chunks(spec: ChunkSpec, tiers: ChunkTiers, manager: ChunkManager) -> Chunk:
    """Make all chunks of one index, zeroed, or none."""
    made = []
    try:
        if spec.sharded:
            compute = spec.schema.compute
            made.append(manager.new_shared_chunk(PARAM16, spec.index, spec.numel, compute.dtype))
            made.append(manager.new_chunk(SHARD16, spec.index, spec.own_numel, compute.dtype, Tier.HOST))
        for item in spec.schema.optimizer_lists if spec.sharded else spec.schema.lists:
            tier = tiers.compute if item.kind == PARAM16 else tiers.optimizer
            made.append(manager.new_chunk(item.kind, spec.index, spec.own_numel, item.dtype, tier))
    except BaseException:
        for chunk in made:
            manager.remove(chunk)
        raise
    return made[0]


def adopt(
    module: nn.Module,
    layout: Layout,
    placement: Mapping[int, ChunkTiers],
    params: Iterable[ParamSpec],
    data: ModelData,
    interceptor: Interceptor,
    weights: WeightSource | None,
) -> None:
    """Move every parameter into its slot, one at a time, its old memory freed before the next is looked at."""
    schemes = {param.name: param.schema for param in params}
    shared = any(chunk.sharded for chunk in layout.chunks)
    # Of a weight that several processes share none has all on its host.
    lookups = set() if shared else lookup_weights(module)
    by_name = dict(module.named_parameters())
    creation = {name: position for position, name in enumerate(by_name)}
    manager = data.manager
    for spec in layout.chunks:
        chunk = create_chunks(spec, placement[spec.index], manager)
        for name in spec.params:
            param = by_name[name]
            place, first = layout.local_location(name)
            # Strides are kept: kernels sum in memory order, and their bits depend on it.
            region = Region(
                layout.locations[name].offset, tuple(param.shape), torch.empty_like(param, device="meta").stride()
            )
            own = manager[SHARD16, spec.index] if spec.sharded else chunk
            managed = ManagedParam(name, param, schemes[name], place, chunk, region, own, first, name in lookups)
            flat = _own_elements(managed, weights)
            managed.flat(own).copy_(flat)
            if managed.schema.trained:
                for where, part in data.parts(managed, PARAM32, write=True):
                    part.copy_(flat[where])
            # A meta Parameter can't be pointed at real memory: only a tensor of another kind takes its identity.
            if param.is_meta or param.device.type != data.manager.device.type or param.dtype != chunk.dtype:
                replace_data(param, torch.empty(0, dtype=chunk.dtype, device=chunk.device))
            del flat
            data.add(managed)
            interceptor.adopt(managed)
    data.managed_params.sort(key=lambda managed: creation[managed.name])


def _own_elements(managed: ManagedParam, weights: WeightSource | None) -> torch.Tensor:
    """What this process owns of a parameter's value, in a row as the parameter's elements lie in memory."""
    value = managed.param.data
    if value.is_meta:
        if weights is None:
            raise ModelError(f"parameter {managed.name!r} is on the meta device and no `weights` were given to fill it")
        if isinstance(weights, ShardedWeightSource) and (managed.row_major or not managed.location.numel):
            return weights.part(managed.name, managed.shard_start, managed.location.numel)
        value = weights(managed.name)
        if value.shape != managed.shape:
            raise ModelError(f"weights give {tuple(value.shape)} for parameter {managed.name!r} of {managed.shape}")
    return managed.flattened(value)[managed.shard_slice]


def replace_data(param: nn.Parameter, data: torch.Tensor) -> None:
    """Give a Parameter data of another device or dtype while it stays the same object."""
    if not param.is_meta:
        param.data = data
        return
    stand_in = nn.Parameter(data, requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, stand_in)


def promote(
    managed_params: list[ManagedParam],
    layout: Layout,
    data: ModelData,
    interceptor: Interceptor,
    states: tuple[str, ...],
) -> Layout:
    """Give parameters that were frozen, and no longer are, the lists of trained ones: in new chunks, at the end."""
    specs = [
        ParamSpec(
            managed.name, managed.numel, schema_for(dtype_name(managed.chunk.dtype), True, states), managed.embedding
        )
        for managed in managed_params
    ]
    grown = layout.extended(specs)
    for chunk in grown.chunks:
        if (PARAM16, chunk.index) not in data.manager.chunks:
            on_disk = data.manager.disk_tier is not None
            create_chunks(chunk, ChunkTiers(Tier.DEVICE, Tier.DISK) if on_disk else HOST, data.manager)
    data.register_shards(grown)
    for managed, spec in zip(managed_params, specs, strict=True):
        data.ensure_in_memory(managed)
        value = managed.payload().clone()
        data.by_chunk[managed.chunk.index].remove(managed)
        managed.location, managed.shard_start = grown.local_location(managed.name)
        managed.schema = spec.schema
        managed.chunk, managed.device_view = data.manager[PARAM16, managed.location.chunk], None
        managed.shard_chunk = data.manager[SHARD16, managed.location.chunk] if managed.chunk.sharded else managed.chunk
        managed.region = replace(managed.region, offset=grown.locations[managed.name].offset)
        data.by_chunk.setdefault(managed.location.chunk, []).append(managed)
        data.ensure_local(managed)
        flat = managed.flattened(value)[managed.shard_slice]
        managed.flat(managed.shard_chunk).copy_(flat)
        data.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device_valid)
        for where, part in data.parts(managed, PARAM32, write=True):
            part.copy_(flat[where])
        data.set_param_views([managed.chunk])
        interceptor.hook_gradient(managed)
    data.synchronize_processes(Request.STATE)  # others may have asked for what lay there
    for old in [index for index, left in data.by_chunk.items() if not left]:
        for kind in (PARAM16, SHARD16):
            if (kind, old) in data.manager.chunks:
                data.manager.remove(data.manager[kind, old])
        del data.by_chunk[old]
    return grown
