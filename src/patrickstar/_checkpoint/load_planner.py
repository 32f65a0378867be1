"""Load planning: each process reads its own shards, whatever the number of processes that saved."""

import io
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from patrickstar._checkpoint.save_planner import chunk_of, delayed_name_of, list_kind, name_of, saved_kinds
from patrickstar._checkpoint.shard_box import ShardBox, boxes_in
from patrickstar._checkpoint.storage_reader import narrowed
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._layout.schema import PARAM16
from patrickstar._layout.shard_geometry import Box, listed, memory_order, uncovered
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import CheckpointError


@dataclass(frozen=True)
class _Target:
    """Box to load: of this process's shard of a parameter in a chunk list, or a plain tensor."""

    box: Box
    stored: ShardBox | None = None
    kind: str = ""
    value: torch.Tensor | None = None

    @classmethod
    def of(cls, stored: ShardBox, kind: str) -> "_Target":
        return cls(stored.whole, stored, list_kind(stored.managed, kind))


class ShardLoadPlanner(LoadPlanner):
    """Requests this process's shards from torch.distributed.checkpoint and stores what was read.

    tensors: plain tensors to fill, by name. Chunks in memory are filled in place. Data on disk, or not row-major, is
    buffered piece by piece; but nothing is requested for `linked` chunks.
    """

    def __init__(self, data: LocalShards, tensors: dict[str, torch.Tensor], linked: Container[Chunk]) -> None:
        self.data = data
        self.linked = linked
        self.tensors = tensors
        self._targets: dict[tuple[str, tuple[int, ...]], _Target] = {}
        self._metadata: dict[str, TensorStorageMetadata] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        entries = metadata.state_dict_metadata.items()
        self._metadata = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def holds_delayed(self, managed: ManagedParam) -> bool:
        """Return whether the checkpoint holds values that operators read on while an update is delayed.

        Without a delay, or in another precision, training goes on from the masters.
        """
        entry = self._metadata.get(delayed_name_of(managed))
        return managed.schema.delays and entry is not None and entry.properties.dtype == managed.shard_chunk.dtype

    def create_local_plan(self) -> LoadPlan:
        """Return read items for all targets that the checkpoint holds."""
        targets_by_name: dict[str, list[_Target]] = {}
        for name, target in self._all_targets():
            if name in self._metadata:
                targets_by_name.setdefault(name, []).append(target)
                self._targets[name, target.box.offsets] = target
        items = []
        for name, targets in targets_by_name.items():
            chunks = [chunk_of(target.box) for target in targets]
            items += create_read_items_for_chunk_list(name, self._metadata[name], chunks)
        found: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
        for item in items:
            key = _key(item.dest_index)
            offsets = Box(tuple(item.dest_offsets), tuple(item.lengths)).within(self._targets[key].box).offsets
            found.setdefault(key, []).append(Box(offsets, tuple(item.lengths)))
        for key, target in self._targets.items():
            boxes = found.get(key, [])
            if sum(box.numel for box in boxes) != target.box.numel:
                missing = uncovered(target.box, boxes)
                problem = f"lacks {listed(missing)}" if missing else f"has several values for elements of {target.box}"
                raise CheckpointError(f"the checkpoint {problem} of {key[0]}")
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item} was not requested")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to read into: a view of the chunk where possible, else a buffer."""
        target = self._targets[_key(read_item.dest_index)]
        whole = self._in_place(target)
        if whole is not None:
            return narrowed(whole, read_item.dest_offsets, read_item.lengths)
        stored = target.stored
        assert stored is not None, "a plain tensor is filled in place"
        return torch.empty(read_item.lengths, dtype=self.data.dtype_of(stored.managed, target.kind), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Store elements that were read into a buffer; mark the chunk as written."""
        target = self._targets[_key(read_item.dest_index)]
        stored = target.stored
        if stored is None:
            return
        if self._in_place(target) is not None:
            chunk = self._chunk(target)
            self.data.manager.mark_written(chunk, on_device=chunk.device.valid)
            return
        managed, span = stored.managed, stored.span
        if stored.fills_span and target.box.numel == tensor.numel():
            flat = tensor.permute(memory_order(managed.shape, managed.region.strides)).reshape(-1)
        else:  # a part of the span: keep its other elements
            flat = stored.copy(self.data, target.kind)
            narrowed(stored.view(flat), read_item.dest_offsets, read_item.lengths).copy_(tensor)
        for part, values in self.data.parts(managed, target.kind, write=True, within=span):
            values.copy_(flat[part.start - span.start : part.stop - span.start])

    # Internals

    def _chunk(self, target: _Target) -> Chunk:
        assert target.stored is not None
        return self.data.chunk_of(target.stored.managed, target.kind)

    def _in_place(self, target: _Target) -> torch.Tensor | None:
        """Return the target's memory, shaped as its box, if it is in memory and row-major."""
        stored = target.stored
        if stored is None:
            return target.value
        chunk = self._chunk(target)
        self.data.manager.transfers.settle(chunk)
        self.data.update_param_views()
        if not chunk.in_memory or not stored.managed.row_major or stored.managed.restores(target.kind):
            return None
        return stored.view(stored.managed.flat(chunk)[stored.span])

    def _all_targets(self) -> Iterator[tuple[str, _Target]]:
        for managed_params in self.data.by_chunk.values():
            for managed in managed_params:
                for kind in saved_kinds(managed):
                    chunk = self.data.chunk_of(managed, list_kind(managed, kind))
                    if chunk in self.linked:
                        continue
                    # Read one page at a time if it is not read into the chunk.
                    buffered = not chunk.in_memory or managed.restores(kind)
                    length = PAGE_BYTES // chunk.dtype.itemsize if buffered else managed.location.numel
                    for begin in range(0, managed.location.numel, max(1, length)):
                        part = slice(begin, min(begin + length, managed.location.numel))
                        for stored in boxes_in(managed, part):
                            yield name_of(managed, kind), _Target.of(stored, kind)
                if self.holds_delayed(managed):
                    for stored in boxes_in(managed, slice(0, managed.location.numel)):
                        yield delayed_name_of(managed), _Target.of(stored, PARAM16)
        for name, value in self.tensors.items():
            yield name, _Target(Box.whole(value.shape), value=value)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())
