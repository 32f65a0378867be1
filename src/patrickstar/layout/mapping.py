"""The mapping of parameters onto chunks (PatrickStar §6.1): creation order, no straddling, private chunks.

All lists are parallel: a parameter has the same chunk index and the same element offset in each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from patrickstar.errors import ModelError
from patrickstar.layout.lists import Scheme

ALIGN_NUMEL = 32
"""Offsets are multiples of this many elements: 64 bytes, one AVX-512 vector and one cache line, in 16 bits."""


def align(numel: int) -> int:
    """The element count rounded up to the alignment."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it. `alone` asks for a private chunk whatever the size."""

    name: str
    numel: int
    scheme: Scheme
    alone: bool = False


@dataclass(frozen=True)
class Place:
    """Where a parameter lies, in every list that it has: chunk index, first element, elements."""

    chunk: int
    offset: int
    numel: int


@dataclass(frozen=True)
class ChunkSpec:
    """One index of the lists: its scheme, its capacity in elements, who lives there."""

    index: int
    scheme: Scheme
    numel: int
    used: int
    params: tuple[str, ...]
    private: bool

    def nbytes(self, itemsize: int) -> int:
        """Bytes of this chunk in a list of that item size."""
        return self.numel * itemsize

    @property
    def compute_bytes(self) -> int:
        """Bytes of the chunk that operators read."""
        return self.numel * self.scheme.compute.itemsize

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the chunks that only the update reads."""
        return self.numel * sum(spec.itemsize for spec in self.scheme.optimizer_lists)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks of this index."""
        return self.numel * self.scheme.bytes_per_param


@dataclass(frozen=True)
class Layout:
    """Parameters on chunks; everything said in bytes follows from here."""

    chunk_numel: int
    chunks: tuple[ChunkSpec, ...]
    places: dict[str, Place]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(place.numel for place in self.places.values())

    @property
    def param16_bytes(self) -> int:
        """Bytes of the list that operators read."""
        return sum(chunk.compute_bytes for chunk in self.chunks)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of all lists that only the update reads."""
        return sum(chunk.optimizer_bytes for chunk in self.chunks)

    @property
    def model_data_bytes(self) -> int:
        """Bytes of all lists, padding included."""
        return self.param16_bytes + self.optimizer_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of all lists that hold no parameter: alignment and chunk ends."""
        scheme = {chunk.index: chunk.scheme for chunk in self.chunks}
        payload = sum(place.numel * scheme[place.chunk].bytes_per_param for place in self.places.values())
        return self.model_data_bytes - payload

    def extended(self, params: Sequence[ParamSpec]) -> "Layout":
        """This layout with `params` moved to new chunks behind the last; chunks left empty are dropped."""
        more = build_layout(params, self.chunk_numel)
        moved = set(more.places)
        first = max(chunk.index for chunk in self.chunks) + 1
        kept = (replace(c, params=tuple(name for name in c.params if name not in moved)) for c in self.chunks)
        added = tuple(replace(chunk, index=chunk.index + first) for chunk in more.chunks)
        places = {name: replace(place, chunk=place.chunk + first) for name, place in more.places.items()}
        return Layout(self.chunk_numel, tuple(c for c in kept if c.params) + added, self.places | places)

    @property
    def chunk_count(self) -> int:
        """How many chunk indices there are; each has one chunk per list."""
        return len(self.chunks)


@dataclass
class _OpenChunk:
    index: int
    scheme: Scheme
    numel: int
    private: bool
    used: int = 0
    params: list[str] = field(default_factory=list)


def build_layout(params: Sequence[ParamSpec], chunk_numel: int) -> Layout:
    """Place `params`, in the order given, into chunks of `chunk_numel` elements (rounded up to the alignment).

    Parameters of one scheme share chunks. One larger than a chunk gets a private chunk of its own size, and so
    does one that asks to be alone; the last chunk of a scheme ends with its last parameter.
    """
    chunk_numel = align(chunk_numel)
    chunks: list[_OpenChunk] = []
    open_chunks: dict[Scheme, _OpenChunk] = {}
    places: dict[str, Place] = {}
    for param in params:
        if param.name in places:
            raise ModelError(f"parameter {param.name!r} was laid out twice")
        numel = align(param.numel)
        target = open_chunks.get(param.scheme)
        if param.alone or numel > chunk_numel:
            target = _OpenChunk(len(chunks), param.scheme, numel, private=True)
            chunks.append(target)
        elif target is None or target.used + numel > chunk_numel:
            target = _OpenChunk(len(chunks), param.scheme, chunk_numel, private=False)
            chunks.append(target)
            open_chunks[param.scheme] = target
        places[param.name] = Place(target.index, target.used, param.numel)
        target.used += numel
        target.params.append(param.name)
    for last in open_chunks.values():
        last.numel = last.used
    specs = (ChunkSpec(c.index, c.scheme, c.numel, c.used, tuple(c.params), c.private) for c in chunks)
    return Layout(chunk_numel, tuple(specs), places)
