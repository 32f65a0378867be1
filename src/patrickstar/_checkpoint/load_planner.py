"""A checkpoint on its way into an engine: whoever wrote it, on however many processes, each takes its own parts."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from patrickstar._checkpoint.save_planner import boxes_in, chunk_of, kinds_of, list_kind, name_of, unfolded
from patrickstar._checkpoint.storage_reader import narrowed
from patrickstar._layout.shard_geometry import Box, memory_order
from patrickstar._memory.swap_file import PAGE_BYTES
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar.errors import CheckpointError


@dataclass(frozen=True)
class _Target:
    """A box that this process has: elements `first` on of its part of a parameter in a list, or of a tensor at hand."""

    box: Box
    managed: ManagedParam | None
    kind: str
    first: int
    value: torch.Tensor | None = None

    @property
    def run(self) -> slice:
        """Its elements in the part."""
        return slice(self.first, self.first + self.box.numel)


class ShardLoadPlanner(LoadPlanner):
    """Tells torch.distributed.checkpoint what this process needs, and puts it where it belongs.

    tensors: those that are at hand, by name. Chunks in memory are filled where they lie; of what lies on disk, or in
    another order than its shape's, a piece at a time is on its way.
    """

    def __init__(self, data: ModelData, tensors: dict[str, torch.Tensor]) -> None:
        self.data = data
        self.tensors = tensors
        self._targets: dict[tuple[str, tuple[int, ...]], _Target] = {}
        self._metadata: dict[str, TensorStorageMetadata] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take note of what there is."""
        assert metadata is not None
        told = metadata.state_dict_metadata
        self._metadata = {name: one for name, one in told.items() if isinstance(one, TensorStorageMetadata)}

    def create_local_plan(self) -> LoadPlan:
        """What this process needs, where the checkpoint has it."""
        wanted: dict[str, list[_Target]] = {}
        for name, target in self._all_targets():
            if name in self._metadata:
                wanted.setdefault(name, []).append(target)
                self._targets[name, target.box.offsets] = target
        items = []
        for name, targets in wanted.items():
            chunks = [chunk_of(target.box) for target in targets]
            items += create_read_items_for_chunk_list(name, self._metadata[name], chunks)
        filled: dict[tuple[str, tuple[int, ...]], int] = {}
        for item in items:
            key = _key(item.dest_index)
            filled[key] = filled.get(key, 0) + item.lengths.numel()
        for key, target in self._targets.items():
            if filled.get(key, 0) != target.box.numel:
                raise CheckpointError(f"the checkpoint has not all elements of {key[0]}, or some of them twice")
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """No plain data is asked for here."""
        raise AssertionError(f"{read_item} was not asked for")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where elements go: into the chunk itself, if it is in memory and they lie there in their order."""
        target = self._targets[_key(read_item.dest_index)]
        whole = self._in_place(target)
        if whole is not None:
            return narrowed(whole, read_item.dest_offsets, read_item.lengths)
        dtype = self.data.manager[self._list(target)].dtype
        return torch.empty(read_item.lengths, dtype=dtype, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Elements have come."""
        target = self._targets[_key(read_item.dest_index)]
        managed = target.managed
        if managed is None:
            return
        if self._in_place(target) is not None:
            chunk = self.data.manager[self._list(target)]
            self.data.manager.mark_written(chunk, on_device=chunk.device_valid)
            return
        kind = list_kind(managed, target.kind)
        if target.box.numel == tensor.numel():
            flat = _folded(tensor, managed)
        else:  # a part of the box: the rest of it is what is there
            flat = torch.empty(target.box.numel, dtype=tensor.dtype, device="cpu")
            for where, part in self.data.parts(managed, kind, within=target.run):
                flat[where.start - target.first : where.stop - target.first] = part
            box = unfolded(flat, target.box, managed)
            narrowed(box, read_item.dest_offsets, read_item.lengths).copy_(tensor)
        for where, part in self.data.parts(managed, kind, write=True, within=target.run):
            part.copy_(flat[where.start - target.first : where.stop - target.first])

    # Inside

    def _list(self, target: _Target) -> tuple[str, int]:
        assert target.managed is not None
        return list_kind(target.managed, target.kind), target.managed.location.chunk

    def _in_place(self, target: _Target) -> torch.Tensor | None:
        """A target's memory as its box, if it is there and in order."""
        if target.managed is None:
            return target.value
        chunk = self.data.manager[self._list(target)]
        self.data.manager.transfers.wait_idle(chunk)
        self.data.update_param_views()
        if not chunk.in_memory or not target.managed.row_major:
            return None
        return target.managed.flat(chunk)[target.run].view(target.box.sizes)

    def _all_targets(self) -> Iterator[tuple[str, _Target]]:
        for managed_params in self.data.by_chunk.values():
            for managed in managed_params:
                for kind in kinds_of(managed):
                    chunk = self.data.manager[list_kind(managed, kind), managed.location.chunk]
                    # A piece at a time of what does not lie in memory.
                    length = managed.location.numel if chunk.in_memory else PAGE_BYTES // chunk.dtype.itemsize
                    for begin in range(0, managed.location.numel, max(1, length)):
                        part = slice(begin, min(begin + length, managed.location.numel))
                        for first, box in boxes_in(managed, part):
                            yield name_of(managed, kind), _Target(box, managed, kind, first)
        for name, value in self.tensors.items():
            yield name, _Target(Box.whole(value.shape), None, "", 0, value)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _folded(tensor: torch.Tensor, managed: ManagedParam) -> torch.Tensor:
    """Elements of a box in the order of the parameter's memory."""
    return tensor.permute(memory_order(managed.shape, managed.region.strides)).reshape(-1)
