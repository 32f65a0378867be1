"""The mapping of parameters onto chunks (PatrickStar §6.1): creation order, no straddling, private chunks.

All lists are parallel: a parameter has the same chunk index and the same element offset in each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from patrickstar._layout.schema import ParamSchema
from patrickstar.errors import ModelError

# [Note: chunks of several processes]
# With p processes an index stands for a communication group of §7: p chunks in a row, chunk k owned by process k. On
# the device they are one buffer, gathered by one collective, and what operators read. Of the other lists a process has
# its own part alone. A parameter lies in one of the p chunks, so its owner updates it alone; one that is larger than a
# chunk makes a group by itself and is shared out evenly. Where a whole group is more than the device holds, chunks are
# not grouped: chunk i, owned by process i mod p, comes to the others from there.

# [Note: alignment]
# PyTorch tells cuBLASLt how the addresses of a matrix product's operands and of its bias are aligned, up to 256 bytes,
# and cuBLASLt chooses the kernel by that. Tensors from PyTorch's own allocator always reach 256 bytes. A parameter that
# did not could be multiplied by another kernel, which adds in another order: other bits than plain PyTorch's. On the
# device chunks begin at multiples of 256 bytes or more, so it is enough that offsets are such multiples in the
# narrowest floating dtype. One-byte integers, which no such kernel reads, get 128.
ALIGN_NUMEL = 128
"""Offsets and chunk sizes are multiples of this many elements: 256 bytes in 16 bits. See [Note: alignment]."""


def align(numel: int) -> int:
    """Return the element count rounded up to the alignment."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it. `alone` asks for a private chunk whatever the size."""

    name: str
    numel: int
    schema: ParamSchema
    alone: bool = False


@dataclass(frozen=True)
class ParamLocation:
    """Where a parameter lies, in every list that it has: chunk index, first element, elements."""

    chunk: int
    offset: int
    numel: int


@dataclass(frozen=True)
class ChunkSpec:
    """One index of the lists: its scheme, its capacity in elements, who lives there.

    cuts: where the parts of several processes begin, and the end. rank: whose part is spoken of.
    """

    index: int
    schema: ParamSchema
    numel: int
    used: int
    params: tuple[str, ...]
    private: bool
    shard_bounds: tuple[int, ...] = ()
    rank: int = 0

    @property
    def sharded(self) -> bool:
        """Whether it is the chunks of several processes."""
        return len(self.shard_bounds) > 2

    @property
    def own(self) -> slice:
        """The elements that this process owns."""
        return slice(*self.shard_bounds[self.rank : self.rank + 2]) if self.sharded else slice(0, self.numel)

    @property
    def own_numel(self) -> int:
        """How many these are."""
        numel: int = self.own.stop - self.own.start
        return numel

    def nbytes(self, itemsize: int) -> int:
        """Bytes of this process's part in a list of that item size."""
        return self.own_numel * itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of this process's part of what operators read, where that lies apart."""
        return self.own_numel * self.schema.compute.itemsize if self.sharded else 0

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the chunk that operators read which need a place below when they leave the device."""
        return 0 if self.sharded else self.compute_bytes

    @property
    def compute_bytes(self) -> int:
        """Bytes of the chunk that operators read, on the device."""
        return self.numel * self.schema.compute.itemsize

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the chunks that only the update reads."""
        return self.own_numel * sum(spec.itemsize for spec in self.schema.optimizer_lists)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks of this index that the process owns."""
        return self.own_numel * self.schema.bytes_per_param


@dataclass(frozen=True)
class Layout:
    """Parameters on chunks; everything said in bytes follows from here."""

    chunk_numel: int
    chunks: tuple[ChunkSpec, ...]
    locations: dict[str, ParamLocation]
    grouped: bool = True

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(place.numel for place in self.locations.values())

    def local_location(self, name: str) -> tuple[ParamLocation, int]:
        """Where this process's part of a parameter lies in its own lists, and its first element in the parameter."""
        place = self.locations[name]
        own = next(chunk for chunk in self.chunks if chunk.index == place.chunk).own
        begin, end = max(place.offset, own.start), min(place.offset + place.numel, own.stop)
        if begin >= end and not (place.numel == 0 and own.start <= place.offset < own.stop):
            return ParamLocation(place.chunk, 0, 0), 0
        return ParamLocation(place.chunk, begin - own.start, end - begin), begin - place.offset

    @property
    def param16_bytes(self) -> int:
        """Bytes of the list that operators read, all of it on the device."""
        return sum(chunk.compute_bytes for chunk in self.chunks)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of all lists that only the update reads."""
        return sum(chunk.optimizer_bytes for chunk in self.chunks)

    @property
    def model_data_bytes(self) -> int:
        """Bytes of all lists that this process owns, padding included."""
        return sum(chunk.total_bytes for chunk in self.chunks)

    @property
    def padding_bytes(self) -> int:
        """Bytes of all lists that hold no parameter: alignment and chunk ends."""
        schema = {chunk.index: chunk.schema for chunk in self.chunks}
        own = (self.local_location(name)[0] for name in self.locations)
        payload = sum(place.numel * schema[place.chunk].bytes_per_param for place in own)
        return self.model_data_bytes - payload

    def extended(self, params: Sequence[ParamSpec]) -> "Layout":
        """This layout with `params` moved to new chunks behind the last; chunks left empty are dropped."""
        nproc, rank = max(1, len(self.chunks[0].shard_bounds) - 1), self.chunks[0].rank
        first = max(chunk.index for chunk in self.chunks) + 1
        more = build_layout(params, self.chunk_numel, nproc, rank, grouped=self.grouped, first=first)
        moved = set(more.locations)
        kept = (replace(c, params=tuple(name for name in c.params if name not in moved)) for c in self.chunks)
        chunks = (*(chunk for chunk in kept if chunk.params), *more.chunks)
        return Layout(self.chunk_numel, chunks, self.locations | more.locations, self.grouped)

    @property
    def chunk_count(self) -> int:
        """How many chunk indices there are; each has one chunk per list."""
        return len(self.chunks)


@dataclass
class _OpenChunk:
    index: int
    schema: ParamSchema
    private: bool
    end: int = 0
    params: list[tuple[str, int]] = field(default_factory=list)


def build_layout(
    params: Sequence[ParamSpec],
    chunk_numel: int,
    nproc: int = 1,
    rank: int = 0,
    *,
    grouped: bool = True,
    first: int = 0,
) -> Layout:
    """ParamLocation `params`, in the order given, into chunks of `chunk_numel` elements (rounded up to the alignment).

    Parameters of one scheme share chunks. One larger than a chunk gets a private chunk of its own size, and so
    does one that asks to be alone; the last chunk of a scheme ends with its last parameter. With `nproc` processes
    chunks come in groups of as many, unless not `grouped`. See [Note: chunks of several processes]. Indices begin
    with `first`.
    """
    chunk_numel = align(chunk_numel)
    at_once = nproc if grouped else 1
    chunks: list[_OpenChunk] = []
    open_chunks: dict[ParamSchema, _OpenChunk] = {}
    seen: set[str] = set()
    for param in params:
        if param.name in seen:
            raise ModelError(f"parameter {param.name!r} was laid out twice")
        seen.add(param.name)
        item = param.name, param.numel
        target = open_chunks.get(param.schema)
        if param.alone or align(param.numel) > chunk_numel:
            chunks.append(_OpenChunk(first + len(chunks), param.schema, True, params=[item]))
            continue
        offset = None if target is None else _offset(target.end, param.numel, chunk_numel, at_once)
        if target is None or offset is None:
            target, offset = _OpenChunk(first + len(chunks), param.schema, False), 0
            chunks.append(target)
            open_chunks[param.schema] = target
        target.params.append(item)
        target.end = offset + align(param.numel)
    locations: dict[str, ParamLocation] = {}
    specs = []
    for one in chunks:
        used = sum(align(numel) for _, numel in one.params)
        if one.private:
            part = align(-(-used // at_once))
            locations[one.params[0][0]] = ParamLocation(one.index, 0, one.params[0][1])
        else:
            part = chunk_numel if one is not open_chunks[one.schema] else _least_part(one.params, chunk_numel, at_once)
            offsets = _pack(one.params, part, at_once)
            assert offsets is not None, "what was put there fits"
            locations |= {
                name: ParamLocation(one.index, offset, numel)
                for (name, numel), offset in zip(one.params, offsets, strict=True)
            }
        shard_bounds: tuple[int, ...] = ()
        if nproc > 1:
            owner = one.index % nproc
            shard_bounds = tuple(k * part if grouped else part * (k > owner) for k in range(nproc + 1))
        names = tuple(name for name, _ in one.params)
        specs.append(ChunkSpec(one.index, one.schema, part * at_once, used, names, one.private, shard_bounds, rank))
    return Layout(chunk_numel, tuple(specs), {param.name: locations[param.name] for param in params}, grouped)


def _pack(params: Sequence[tuple[str, int]], part: int, count: int) -> list[int] | None:
    """Offsets of parameters that follow one another, none across the end of one of `count` parts; None if too many."""
    offsets, end = [], 0
    for _, numel in params:
        offset = _offset(end, numel, part, count)
        if offset is None:
            return None
        offsets.append(offset)
        end = offset + align(numel)
    return offsets


def _offset(end: int, numel: int, part: int, count: int) -> int | None:
    """Where the next parameter lies, the one before it ending at `end`; None if there is no room."""
    numel = align(numel)
    if part and end % part + numel > part and end % part:
        end += part - end % part
    return None if numel > part or end + numel > part * count else end


def _least_part(params: Sequence[tuple[str, int]], part: int, count: int) -> int:
    """The smallest size of parts that `count` of hold these parameters; at most `part`."""
    lower, upper = 0, part // ALIGN_NUMEL
    while lower < upper:
        middle = (lower + upper) // 2
        if _pack(params, middle * ALIGN_NUMEL, count) is None:
            lower = middle + 1
        else:
            upper = middle
    return upper * ALIGN_NUMEL
