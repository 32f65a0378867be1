"""Save planning: the tensor shards and plain data that each process writes."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from xxhash import xxh3_64_hexdigest

from patrickstar._checkpoint.manifest import LARGEST_BYTES
from patrickstar._checkpoint.safetensors_file import DENSE_ADVICE, DTYPES
from patrickstar._checkpoint.shard_box import ShardBox, boxes_in
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._layout.shard_geometry import Box, listed, uncovered
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar.errors import CheckpointError


def name_of(managed: ManagedParam, kind: str) -> str:
    """Return the name of a parameter or optimizer state, as torch.distributed.checkpoint names them."""
    return f"model.{managed.name}" if kind in (PARAM16, PARAM32) else f"optim.state.{managed.name}.{kind}"


def delayed_name_of(managed: ManagedParam) -> str:
    """Return the name of the values that operators read while the update of a parameter is delayed."""
    return f"delayed.{managed.name}"


def saved_kinds(managed: ManagedParam) -> tuple[str, ...]:
    """Return the chunk lists to save: master parameter and optimizer states, or the parameter itself if frozen."""
    return (managed.full_kind, *managed.state_kinds)


def list_kind(managed: ManagedParam, kind: str) -> str:
    """Return the chunk list that stores this process's shard."""
    return managed.shard_chunk.kind if kind == PARAM16 else kind


@dataclass(frozen=True)
class TensorShard:
    """Box of a tensor to save.

    A box of this process's shard of a parameter in chunk list `kind`; or a tensor; or plain data.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    stored: ShardBox | None = None
    kind: str = ""
    value: torch.Tensor | None = None
    plain: bytes | None = None

    @classmethod
    def of(cls, name: str, stored: ShardBox, kind: str, dtype: torch.dtype) -> "TensorShard":
        """Return a box of a parameter's list."""
        return cls(name, stored.managed.full_shape, stored.whole, dtype, stored, kind)

    @property
    def managed(self) -> ManagedParam | None:
        """Parameter of the box, None for other data."""
        return None if self.stored is None else self.stored.managed

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, None if self.plain is not None else self.box.offsets)

    def copied(self) -> "TensorShard":
        """Return it with a copy of its value, which later changes of a buffer leave as it is."""
        return self if self.value is None else replace(self, value=self.value.detach().clone())

    def item(self) -> WriteItem:
        if self.plain is not None:
            data = BytesIOWriteData(nbytes=len(self.plain))
            return WriteItem(self.index, WriteItemType.BYTE_IO, bytes_io_data=data)
        properties = TensorProperties(dtype=self.dtype)
        tensor_data = TensorWriteData(chunk=chunk_of(self.box), properties=properties, size=torch.Size(self.shape))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=tensor_data)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def param_shards(data: LocalShards, order: Sequence[int]) -> list[TensorShard]:
    """Return this process's shards of parameters and optimizer states, chunk by chunk.

    What may change before the next update comes first: frozen parameters, and those whose update is delayed.
    """
    is_first_rank = data.world.rank == 0
    frozen = [index for index in order if not data.by_chunk[index][0].schema.trained]
    trained = [index for index in order if data.by_chunk[index][0].schema.trained]
    return [
        *_list_shards(data, frozen, is_first_rank),
        *_delayed_shards(data, trained),
        *_list_shards(data, trained, is_first_rank),
    ]


def _delayed_shards(data: LocalShards, order: Sequence[int]) -> list[TensorShard]:
    """Return shards of the parameters that are not their rounded masters. See [Note: delayed updates]."""
    return [
        TensorShard.of(delayed_name_of(managed), stored, PARAM16, managed.shard_chunk.dtype)
        for index in order
        for managed in data.by_chunk[index]
        if managed.state.late
        for stored in boxes_in(managed, slice(0, managed.location.numel))
    ]


def _list_shards(data: LocalShards, order: Sequence[int], is_first_rank: bool) -> list[TensorShard]:
    """Return shards of the saved chunk lists of these indices."""
    shards = []
    for index in order:
        # Chunk list by chunk list, so that the file has the same order as memory.
        for kind in saved_kinds(data.by_chunk[index][0]):
            for managed in data.by_chunk[index]:
                if not managed.counts:  # another group of processes has the same part
                    continue
                if not prod(managed.full_shape) and is_first_rank:
                    whole = Box.whole(managed.full_shape)
                    empty = ShardBox(managed, whole, whole)
                    shards.append(TensorShard.of(name_of(managed, kind), empty, kind, managed.full_dtype))
                dtype = data.dtype_of(managed, list_kind(managed, kind))
                for stored in boxes_in(managed, slice(0, managed.location.numel)):
                    shards.append(TensorShard.of(name_of(managed, kind), stored, kind, dtype))
    return shards


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Return shards of whole tensors. Raises CheckpointError if safetensors cannot store one."""
    for name, value in tensors.items():
        if value.dtype not in DTYPES or value.layout is not torch.strided:
            advice = "" if value.layout is torch.strided else f": {DENSE_ADVICE}"
            raise CheckpointError(
                f"{name} has {value.dtype} and {value.layout}, which safetensors cannot store{advice}"
            )
    return [
        TensorShard(name, tuple(value.shape), Box.whole(value.shape), value.dtype, value=value)
        for name, value in tensors.items()
    ]


def json_item(name: str, text: bytes) -> TensorShard:
    """Return plain data, padded to a multiple of 8 bytes. Raises CheckpointError above the size limit."""
    if len(text) > LARGEST_BYTES - 8:
        raise CheckpointError(
            f"{name} has {len(text)} bytes of plain data, and a checkpoint stores at most {LARGEST_BYTES}; save large "
            f"tensors in separate files"
        )
    padded = text.ljust(-(-len(text) // 8) * 8)
    return TensorShard(name, (len(padded),), Box.whole((len(padded),)), torch.uint8, plain=padded)


def page_slices(shard: TensorShard, page_bytes: int) -> list[slice]:
    """Split a shard's elements into pages; a shard that is not row-major is one slice."""
    length = page_bytes // shard.dtype.itemsize
    if shard.managed is None or not shard.managed.row_major:
        return [slice(0, shard.box.numel)]
    return [slice(begin, min(begin + length, shard.box.numel)) for begin in range(0, shard.box.numel, length)]


def read_slice(shard: TensorShard, data: LocalShards, part: slice) -> Iterator[torch.Tensor]:
    """Yield elements of a shard in row-major order. Use each tensor at once: chunks move."""
    if shard.plain is not None:
        yield torch.frombuffer(bytearray(shard.plain), dtype=torch.uint8)
        return
    if shard.stored is None:
        assert shard.value is not None
        yield shard.value.detach().contiguous()
        return
    stored, kind = shard.stored, list_kind(shard.stored.managed, shard.kind)
    if stored.in_order:
        first = stored.span.start
        for _, values in data.parts(stored.managed, kind, within=slice(first + part.start, first + part.stop)):
            yield values
        return
    for rows in stored.rows(part):
        yield rows.view(rows.copy(data, kind)).contiguous()


class ShardSavePlanner(SavePlanner):
    """Plans the write items of this process for torch.distributed.checkpoint."""

    def __init__(self, shards: Sequence[TensorShard], data: LocalShards) -> None:
        self.shards = {shard.index: shard for shard in shards}
        self.data = data

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the shards were passed to the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Return the items in writing order."""
        return SavePlan([shard.item() for shard in self.shards.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all processes into the metadata of the tensors.

        Raises:
            CheckpointError: The processes do not hold all elements of a tensor.
        """
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                _check_covered(name, tensor)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a whole item, for other storage writers; CheckpointWriter writes pages."""
        shard = self.shards[write_item.index]
        if shard.plain is not None:
            return io.BytesIO(shard.plain)
        parts = read_slice(shard, self.data, slice(0, shard.box.numel))
        return torch.cat([part.to("cpu", copy=True).reshape(-1) for part in parts]).view(shard.box.sizes)


def _check_covered(name: str, tensor: TensorStorageMetadata) -> None:
    """Raise CheckpointError if the planned boxes do not cover a tensor."""
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    if sum(box.numel for box in boxes) < tensor.size.numel():
        missing = listed(uncovered(Box.whole(tensor.size), boxes))
        raise CheckpointError(
            f"no process holds elements {missing} of {name}, whose shape is {tuple(tensor.size)}; a local tensor of a "
            f"DTensor must have the size that its placements give"
        )


def rank_buffer_key(name: str, rank: int) -> str:
    """Return the key of a buffer whose value differs from that of rank 0."""
    return f"ranks.{rank}.model.{name}"


def checksum(value: torch.Tensor) -> str:
    """Return the hash of a tensor's bytes, to compare buffers of processes."""
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxh3_64_hexdigest(flat.numpy().tobytes())
