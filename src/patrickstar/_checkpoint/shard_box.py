"""Box of a parameter that is in this process's shard, and its elements there."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from patrickstar._layout.local_boxes import boxes_in_range
from patrickstar._layout.shard_geometry import Box, boxes_of, memory_range
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam

# [Note: boxes of a shard]
# A shard is a range of a parameter's elements in memory order. If the parameter is a DTensor, they are those of its
# local tensor. The range is cut into boxes of the local tensor, and these at the boxes of the global tensor that the
# process holds. If it holds several (see [Note: boxes of a DTensor]), the elements of a box may be interleaved with
# those of another one in memory.


@dataclass(frozen=True)
class ShardBox:
    """Box of a parameter that is in this process's shard. See [Note: boxes of a shard].

    Attributes:
        managed: The parameter.
        whole: The box in the parameter.
        local: The box in the tensor that chunks hold, which differs for a DTensor.
    """

    managed: ManagedParam
    whole: Box
    local: Box

    @property
    def span(self) -> slice:
        """Elements of the shard from the first to the last of the box, in memory order."""
        first, end = memory_range(self.local, self.managed.region.strides)
        return slice(first - self.managed.shard_start, end - self.managed.shard_start)

    @property
    def fills_span(self) -> bool:
        """True if no element of another box is in the span."""
        first, end = memory_range(self.local, self.managed.region.strides)
        return end - first == self.whole.numel

    @property
    def in_order(self) -> bool:
        """True if the elements are consecutive in memory, in row-major order."""
        return self.managed.row_major and self.fills_span

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """View the elements of the span as a tensor of the box's sizes."""
        return flat.as_strided(self.local.sizes, self.managed.region.strides, flat.storage_offset())

    def copy(self, data: LocalShards, kind: str) -> torch.Tensor:
        """Return a copy of the elements of the span in a chunk list, on the host."""
        span = self.span
        dtype = data.dtype_of(self.managed, kind)
        flat = torch.empty(span.stop - span.start, dtype=dtype, device="cpu")
        for part, values in data.parts(self.managed, kind, within=span):
            flat[part.start - span.start : part.stop - span.start] = values
        return flat

    def rows(self, part: slice) -> Iterator["ShardBox"]:
        """Yield the boxes that cover elements `part` of this box, in row-major order."""
        for _, box in boxes_of(self.local.sizes, part.start, part.stop):
            yield ShardBox(self.managed, box.within(self.whole), box.within(self.local))


def boxes_in(managed: ManagedParam, part: slice) -> Iterator[ShardBox]:
    """Yield the boxes that cover elements `part` of this process's shard, counted in memory order."""
    tensor = Box.whole(managed.shape)
    own = managed.sharding.parts[managed.sharding.rank] if managed.sharding and managed.sharding.parts else None
    first, end = managed.shard_start + part.start, managed.shard_start + part.stop
    boxes = own or ((tensor, tensor),)
    for local, whole in boxes_in_range(managed.shape, managed.region.strides, boxes, first, end):
        yield ShardBox(managed, whole, local)
