"""What a checkpoint of an engine consists of: tensors, and where each process's parts of them lie; plain data."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from patrickstar._checkpoint.manifest import LARGEST_BYTES
from patrickstar._checkpoint.safetensors_file import DTYPES
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._layout.shard_geometry import Box, boxes_of, memory_order
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar.errors import CheckpointError


def name_of(managed: ManagedParam, kind: str) -> str:
    """The name of a parameter, or of a state of it: as torch.distributed.checkpoint names them."""
    return f"model.{managed.name}" if kind in (PARAM16, PARAM32) else f"optim.state.{managed.name}.{kind}"


def kinds_of(managed: ManagedParam) -> tuple[str, ...]:
    """The lists in which all that there is of a parameter lies: the master and states, or itself if it is frozen."""
    return tuple(spec.kind for spec in managed.schema.optimizer_lists) or (PARAM16,)


def list_kind(managed: ManagedParam, kind: str) -> str:
    """The list in which this process has its part."""
    return managed.shard_chunk.kind if kind == PARAM16 else kind


@dataclass(frozen=True)
class TensorShard:
    """A box of a tensor, as this process has it.

    That is elements `first` on of its part of a parameter, in a list `kind`; or a tensor, or plain data, at hand.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    managed: ManagedParam | None = None
    kind: str = ""
    first: int = 0
    value: torch.Tensor | None = None
    plain: bytes | None = None

    @property
    def index(self) -> MetadataIndex:
        """Its name and place."""
        return MetadataIndex(self.name, None if self.plain is not None else self.box.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its place in the tensor, for torch.distributed.checkpoint."""
        return chunk_of(self.box)

    def item(self) -> WriteItem:
        """What is to be written, for torch.distributed.checkpoint."""
        if self.plain is not None:
            data = BytesIOWriteData(nbytes=len(self.plain))
            return WriteItem(self.index, WriteItemType.BYTE_IO, bytes_io_data=data)
        properties = TensorProperties(dtype=self.dtype)
        told = TensorWriteData(chunk=self.chunk, properties=properties, size=torch.Size(self.shape))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=told)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """A box, for torch.distributed.checkpoint."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def boxes_in(managed: ManagedParam, part: slice) -> Iterator[tuple[int, Box]]:
    """The boxes of the parameter that elements of this process's part are, with the first element of each in the part.

    Elements are counted as they lie in memory; the boxes are the tensor's.
    """
    order = memory_order(managed.shape, managed.region.strides)
    begin = managed.shard_start + part.start
    for first, box in boxes_of([managed.shape[dim] for dim in order], begin, managed.shard_start + part.stop):
        yield first - managed.shard_start, in_order(box, order)


def in_order(box: Box, order: Sequence[int]) -> Box:
    """A box of a tensor whose dimensions were put into this order, in the tensor itself."""
    offsets, sizes = [0] * len(order), [0] * len(order)
    for place, dim in enumerate(order):
        offsets[dim], sizes[dim] = box.offsets[place], box.sizes[place]
    return Box(tuple(offsets), tuple(sizes))


def pieces_of(data: ModelData, order: Sequence[int]) -> list[TensorShard]:
    """All that this process has of parameters and states, chunk after chunk; first what is frozen."""
    found = []
    first_process = data.comm is None or data.comm.world.rank == 0
    order = sorted(order, key=lambda index: data.by_chunk[index][0].schema.trained)
    for index in order:
        # List by list: what follows one another in memory does in the file.
        for kind in kinds_of(data.by_chunk[index][0]):
            for managed in data.by_chunk[index]:
                if not managed.numel and first_process:
                    empty = TensorShard(
                        name_of(managed, kind),
                        managed.shape,
                        Box.whole(managed.shape),
                        managed.full_dtype,
                        managed,
                        kind,
                    )
                    found.append(empty)
                dtype = data.manager[list_kind(managed, kind), index].dtype
                for first, box in boxes_in(managed, slice(0, managed.location.numel)):
                    found.append(TensorShard(name_of(managed, kind), managed.shape, box, dtype, managed, kind, first))
    return found


def pieces_of_tensors(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Tensors that are at hand, whole. Raises CheckpointError for one that no file can hold."""
    for name, value in tensors.items():
        if value.dtype not in DTYPES or value.layout is not torch.strided:
            raise CheckpointError(f"{name} is of {value.dtype} and {value.layout}, which no safetensors file holds")
    return [
        TensorShard(name, tuple(value.shape), Box.whole(value.shape), value.dtype, value=value)
        for name, value in tensors.items()
    ]


def json_item(name: str, text: bytes) -> TensorShard:
    """Plain data; what follows begins at a multiple of eight bytes. Raises CheckpointError if it is too much."""
    if len(text) > LARGEST_BYTES - 8:
        raise CheckpointError(
            f"{name} has {len(text)} bytes of plain data, and a checkpoint holds {LARGEST_BYTES} at most; keep large "
            f"tensors in files of their own"
        )
    padded = text.ljust(-(-len(text) // 8) * 8)
    return TensorShard(name, (len(padded),), Box.whole((len(padded),)), torch.uint8, plain=padded)


def runs_of(piece: TensorShard, page_bytes: int) -> list[slice]:
    """A piece's elements in runs of a page; of one that lies in another order than its shape's, all at once."""
    length = page_bytes // piece.dtype.itemsize
    if piece.managed is None or not piece.managed.row_major:
        return [slice(0, piece.box.numel)]
    return [slice(begin, min(begin + length, piece.box.numel)) for begin in range(0, piece.box.numel, length)]


def values(piece: TensorShard, data: ModelData, run: slice) -> Iterator[torch.Tensor]:
    """The elements of a run, in the order of the piece's box. To be taken at once: chunks move."""
    if piece.plain is not None:
        yield torch.frombuffer(bytearray(piece.plain), dtype=torch.uint8)
        return
    if piece.managed is None:
        assert piece.value is not None
        yield piece.value.detach().contiguous()
        return
    managed, within = piece.managed, slice(piece.first + run.start, piece.first + run.stop)
    parts = data.parts(managed, list_kind(managed, piece.kind), within=within)
    if managed.row_major:
        for _, part in parts:
            yield part
        return
    flat = torch.empty(piece.box.numel, dtype=piece.dtype, device="cpu")
    for where, part in parts:
        flat[where.start - piece.first : where.stop - piece.first] = part
    yield unfolded(flat, piece.box, managed).contiguous()


def unfolded(flat: torch.Tensor, box: Box, managed: ManagedParam) -> torch.Tensor:
    """Elements of a box in the order of the parameter's memory, as a tensor of the box's sizes."""
    order = memory_order(managed.shape, managed.region.strides)
    back = sorted(range(len(order)), key=lambda place: order[place])
    return flat.view([box.sizes[dim] for dim in order]).permute(back)


class ShardSavePlanner(SavePlanner):
    """Tells torch.distributed.checkpoint what this process has to write."""

    def __init__(self, pieces: Sequence[TensorShard], data: ModelData) -> None:
        self.pieces = {piece.index: piece for piece in pieces}
        self.data = data

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """It knows what there is."""

    def create_local_plan(self) -> SavePlan:
        """The items, in the order in which they are to be written."""
        return SavePlan([piece.item() for piece in self.pieces.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What all processes write makes the tensors."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """An item as a whole, for writers that ask so; this package's takes it in pages."""
        piece = self.pieces[write_item.index]
        if piece.plain is not None:
            return io.BytesIO(piece.plain)
        whole = values(piece, self.data, slice(0, piece.box.numel))
        return torch.cat([part.to("cpu", copy=True).reshape(-1) for part in whole]).view(piece.box.sizes)
