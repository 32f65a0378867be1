"""Mapping of parameters onto chunks, and search for the chunk size with the least padding (PatrickStar §6.1).

Parameters are mapped in creation order, never across a chunk boundary. All chunk lists are parallel: a parameter has
the same chunk index and the same element offset in each of them.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from patrickstar._layout.schema import ParamSchema
from patrickstar._layout.shard_group import ShardGroup, largest_group
from patrickstar.errors import ModelError

# [Note: chunk groups]
# With p processes, an index denotes a communication group (PatrickStar §7): p consecutive chunks, of which rank k owns
# chunk k. On the device they form one buffer, which one all-gather fills and operators read. Of the other lists each
# rank stores only its own shard. A parameter lies within one of the p chunks, so its owner updates it alone; a
# parameter larger than a chunk forms a group of its own and is sharded evenly. If the device can't hold a whole group,
# chunks are not grouped: rank i mod p owns chunk i and sends it to the others.
#
# If the p processes are R replicas (nodes) of S processes each, chunk k of a chunk group is part of shard k // R, and
# its owner belongs to replica k % R. So the R chunks of a shard follow each other, and each replica can gather the S
# shards among its own processes: see [Note: two levels of transport].

# [Note: alignment]
# PyTorch passes the alignment of a matrix product's operands and bias, up to 256 bytes, to cuBLASLt, which selects the
# kernel by it. Tensors from PyTorch's allocator are always aligned to 256 bytes. A parameter with a smaller alignment
# could be multiplied by a kernel that adds in a different order, so the result would differ in bits from plain
# PyTorch. Chunks begin at multiples of at least 256 bytes on the device, so it suffices that offsets are multiples of
# 256 bytes in the narrowest floating dtype. One-byte integers, which no such kernel reads, are aligned to 128 bytes.
ALIGN_NUMEL = 128
"""Unit of offsets and chunk sizes in elements: 256 bytes in 16 bits. See [Note: alignment]."""


def align(numel: int) -> int:
    """Round an element count up to the alignment."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


@dataclass(frozen=True)
class ParamSpec:
    """Name, size and schema of a parameter. `alone` requests a private chunk regardless of the size.

    `group`: the processes that share its chunks, None with one process. If their parts of the parameter have different
    sizes, `numel` is the largest. `whole`: one process owns all of it, even if it is larger than a chunk.
    """

    name: str
    numel: int
    schema: ParamSchema
    alone: bool = False
    group: ShardGroup | None = None
    whole: bool = False


@dataclass(frozen=True)
class ParamLocation:
    """Location of a parameter in each of its chunk lists: chunk index, offset and length in elements."""

    chunk: int
    offset: int
    numel: int


@dataclass(frozen=True)
class ChunkSpec:
    """Chunks of one index in all lists: schema, capacity and used elements, and names of the parameters.

    With several processes, `shard_bounds` holds the first element of each shard of `group` and the end.
    """

    index: int
    schema: ParamSchema
    numel: int
    used: int
    params: tuple[str, ...]
    private: bool
    shard_bounds: tuple[int, ...] = ()
    group: ShardGroup | None = None

    @property
    def sharded(self) -> bool:
        """True if its `param16` chunk on the device is a copy of shards, which a group of processes owns."""
        return self.group is not None

    @property
    def own(self) -> slice:
        """Slice of the elements that this rank owns."""
        if self.group is None:
            return slice(0, self.numel)
        return slice(*self.shard_bounds[self.group.position : self.group.position + 2])

    @property
    def own_numel(self) -> int:
        numel: int = self.own.stop - self.own.start
        return numel

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of this rank's shard in a list with this item size."""
        return self.own_numel * itemsize

    @property
    def node(self) -> slice:
        """Slice of the elements in `node16`: the shard of this rank's replicate group. Empty without replicas."""
        if self.group is None or self.group.replicas == 1:
            return slice(0, 0)
        owners = self.group.replicate_positions
        return slice(self.shard_bounds[owners.start], self.shard_bounds[owners.stop])

    @property
    def node_numel(self) -> int:
        numel: int = self.node.stop - self.node.start
        return numel

    @property
    def shard_bytes(self) -> int:
        """Bytes of the parts of `param16` beside the gathered chunk: this rank's shard, and `node16`."""
        return (self.own_numel + self.node_numel) * self.schema.compute.itemsize if self.sharded else 0

    @property
    def evictable_bytes(self) -> int:
        """Bytes that evicting the `param16` chunk from the device takes on a lower tier."""
        return 0 if self.sharded else self.compute_bytes

    @property
    def compute_bytes(self) -> int:
        """Bytes of the `param16` chunk on the device."""
        return self.numel * self.schema.compute.itemsize

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the chunks that only the optimizer step reads."""
        return self.own_numel * sum(spec.itemsize for spec in self.schema.optimizer_lists)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the chunks that stay on the host, for lock-free updates."""
        return self.own_numel * sum(spec.itemsize for spec in self.schema.buffers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks of this index that this rank stores, gathered ones aside."""
        return self.own_numel * self.schema.bytes_per_param + self.node_numel * self.schema.compute.itemsize


LISTS_AT_ONCE = 3
"""Chunks whose gradients exist at a time: those of one layer may lie in two, and a third is updated."""


@dataclass(frozen=True)
class Layout:
    """Locations of all parameters, and the sizes that follow from them."""

    chunk_numel: int
    chunks: tuple[ChunkSpec, ...]
    locations: dict[str, ParamLocation]
    grouped: bool = True

    @property
    def numel(self) -> int:
        return sum(location.numel for location in self.locations.values())

    def local_location(self, name: str) -> tuple[ParamLocation, int]:
        """Return the location of this rank's shard of a parameter in its own lists, and its offset in the parameter."""
        location = self.locations[name]
        own = next(chunk for chunk in self.chunks if chunk.index == location.chunk).own
        begin, end = max(location.offset, own.start), min(location.offset + location.numel, own.stop)
        if begin >= end and not (location.numel == 0 and own.start <= location.offset < own.stop):
            return ParamLocation(location.chunk, 0, 0), 0
        return ParamLocation(location.chunk, begin - own.start, end - begin), begin - location.offset

    @property
    def param16_bytes(self) -> int:
        """Bytes of the whole `param16` list on the device."""
        return sum(chunk.compute_bytes for chunk in self.chunks)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of all lists that only the optimizer step reads."""
        return sum(chunk.optimizer_bytes for chunk in self.chunks)

    @property
    def gradient_list_bytes(self) -> int:
        """Bytes of the list of gradients of all trained parameters, if it is allocated."""
        return sum(chunk.nbytes(chunk.schema.gradient_itemsize(True)) for chunk in self.chunks)

    @property
    def gradient_room_bytes(self) -> int:
        """Bytes of gradients beside their parameters that exist at a time, as updates in backward free them."""
        sizes = (chunk.nbytes(chunk.schema.gradient_itemsize(False)) for chunk in self.chunks)
        return sum(sorted(sizes, reverse=True)[:LISTS_AT_ONCE])

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all lists that stay on the host, for lock-free updates."""
        return sum(chunk.buffer_bytes for chunk in self.chunks)

    @property
    def model_data_bytes(self) -> int:
        """Bytes of all lists that this rank stores, including padding, gathered chunks aside."""
        return sum(chunk.total_bytes for chunk in self.chunks)

    @property
    def padding_bytes(self) -> int:
        """Bytes of alignment gaps and unused chunk ends in all lists."""
        chunks = {chunk.index: chunk for chunk in self.chunks}
        payload = 0
        for name, location in self.locations.items():
            chunk = chunks[location.chunk]
            payload += self.local_location(name)[0].numel * chunk.schema.bytes_per_param
            end = location.offset + location.numel
            in_node = min(end, chunk.node.stop) - max(location.offset, chunk.node.start)
            payload += max(0, in_node) * chunk.schema.compute.itemsize
        return self.model_data_bytes - payload

    def extended(self, params: Sequence[ParamSpec]) -> "Layout":
        """Return this layout with `params` moved to new chunks after the last, and without chunks that became empty."""
        first = max(chunk.index for chunk in self.chunks) + 1
        largest = largest_group(chunk.group for chunk in self.chunks)
        added = build_layout(params, self.chunk_numel, grouped=self.grouped, first=first, largest=largest)
        moved = set(added.locations)
        remaining = (replace(c, params=tuple(name for name in c.params if name not in moved)) for c in self.chunks)
        chunks = (*(chunk for chunk in remaining if chunk.params), *added.chunks)
        return Layout(self.chunk_numel, chunks, self.locations | added.locations, self.grouped)

    @property
    def chunk_count(self) -> int:
        """Number of chunk indices. Each has one chunk per list."""
        return len(self.chunks)

    def with_sizes(self, numels: Mapping[str, int]) -> "Layout":
        """Return this layout with other lengths of parameters, at most those they have."""
        locations = {
            name: replace(location, numel=numels.get(name, location.numel)) for name, location in self.locations.items()
        }
        return replace(self, locations=locations)


@dataclass
class _OpenChunk:
    index: int
    schema: ParamSchema
    group: ShardGroup | None
    private: bool
    end: int = 0
    params: list[tuple[str, int]] = field(default_factory=list)
    whole: bool = False
    """True if one process owns the whole index."""


def build_layout(
    params: Sequence[ParamSpec], chunk_numel: int, *, grouped: bool = True, first: int = 0, largest: int | None = None
) -> Layout:
    """Assign `params`, in the given order, to chunks of `chunk_numel` elements (rounded up to the alignment).

    Parameters of one schema and group share chunks. A parameter that is larger than a chunk or requests it (`alone`)
    gets a private chunk. The last chunk of its kind is shrunk to its parameters. With several processes and `grouped`,
    an index is a group of chunks: see [Note: chunk groups]. Chunk indices begin at `first`.

    Args:
        largest: Size of the largest group of processes, by default of those in `params`. Smaller groups have larger
            chunks, so that all chunk groups occupy the same bytes on the device.
    """
    chunk_numel = align(chunk_numel)
    largest = largest_group(param.group for param in params) if largest is None else largest
    chunks: list[_OpenChunk] = []
    open_chunks: dict[tuple[ParamSchema, ShardGroup | None], _OpenChunk] = {}
    seen: set[str] = set()

    def sizes(group: ShardGroup | None) -> tuple[int, int]:
        """Return the elements of a chunk, and the number of chunks in a chunk group."""
        if group is None or not grouped:
            return chunk_numel, 1
        return align(-(-chunk_numel * largest // group.size)), group.size

    for param in params:
        if param.name in seen:
            raise ModelError(f"parameter {param.name!r} appears twice in the layout")
        seen.add(param.name)
        item, kind = (param.name, param.numel), (param.schema, param.group)
        part, count = sizes(param.group)
        target = open_chunks.get(kind)
        if param.alone or align(param.numel) > part:
            chunks.append(_OpenChunk(first + len(chunks), *kind, True, params=[item], whole=param.whole))
            continue
        offset = None if target is None else _next_offset(target.end, param.numel, part, count)
        if target is None or offset is None:
            target, offset = _OpenChunk(first + len(chunks), *kind, False), 0
            chunks.append(target)
            open_chunks[kind] = target
        target.params.append(item)
        target.end = offset + align(param.numel)
    locations: dict[str, ParamLocation] = {}
    specs = []
    owned: dict[ShardGroup, list[int]] = {}
    """For each group, the elements of the whole indices that each process owns."""
    for chunk in chunks:
        used = sum(align(numel) for _, numel in chunk.params)
        part, count = (used, 1) if chunk.whole else sizes(chunk.group)
        if chunk.private:
            part = align(-(-used // count))
            locations[chunk.params[0][0]] = ParamLocation(chunk.index, 0, chunk.params[0][1])
        else:
            is_last = chunk is open_chunks[chunk.schema, chunk.group]
            part = _smallest_part(chunk.params, part, count) if is_last else part
            offsets = _pack(chunk.params, part, count)
            assert offsets is not None, "the parameters of a chunk must fit it"
            locations |= {
                name: ParamLocation(chunk.index, offset, numel)
                for (name, numel), offset in zip(chunk.params, offsets, strict=True)
            }
        shard_bounds: tuple[int, ...] = ()
        if chunk.group is not None:
            size, owner = chunk.group.size, chunk.index % chunk.group.size
            if chunk.whole:
                sums = owned.setdefault(chunk.group, [0] * size)
                owner = sums.index(min(sums))
                sums[owner] += used
            cut = grouped and not chunk.whole
            shard_bounds = tuple(k * part if cut else part * (k > owner) for k in range(size + 1))
        names = tuple(name for name, _ in chunk.params)
        specs.append(
            ChunkSpec(chunk.index, chunk.schema, part * count, used, names, chunk.private, shard_bounds, chunk.group)
        )
    return Layout(chunk_numel, tuple(specs), {param.name: locations[param.name] for param in params}, grouped)


def _pack(params: Sequence[tuple[str, int]], part: int, count: int) -> list[int] | None:
    """Return offsets of consecutive parameters, none across the end of one of `count` parts, or None if too many."""
    offsets, end = [], 0
    for _, numel in params:
        offset = _next_offset(end, numel, part, count)
        if offset is None:
            return None
        offsets.append(offset)
        end = offset + align(numel)
    return offsets


def _next_offset(end: int, numel: int, part: int, count: int) -> int | None:
    """Return the offset of a parameter whose predecessor ends at `end`, or None if it does not fit."""
    numel = align(numel)
    if part and end % part + numel > part and end % part:
        end += part - end % part
    return None if numel > part or end + numel > part * count else end


def _smallest_part(params: Sequence[tuple[str, int]], part: int, count: int) -> int:
    """Return the smallest part size, up to `part`, for which `count` parts hold these parameters."""
    sizes = range(0, part, ALIGN_NUMEL)
    return ALIGN_NUMEL * bisect_left(sizes, True, key=lambda size: _pack(params, size, count) is not None)
