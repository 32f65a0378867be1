"""Chunk-size search (PatrickStar §6.1): the size with the least padding in a range."""

from collections.abc import Sequence

from patrickstar._layout.chunk_mapping import ALIGN_NUMEL, Layout, ParamSpec, align, build_layout
from patrickstar._layout.shard_group import largest_group

PIPELINE_CHUNKS = 4
"""Chunks that the device should hold at once: two used by an operator, one being fetched, one being evicted."""

LARGEST_CHUNK_BYTES = 64 * 1024**2
"""Size at which a copy's fixed cost is negligible. Larger chunks would only make eviction coarser."""

LARGEST_CHUNK_BYTES_WITH_DISK = 8 * 1024**2
"""Two pages. The parameters of a chunk become up to date together. Those of the first layers are updated last and
needed first, so with small chunks less data waits for the disk. Small chunks cost nothing: transfers are by page."""

CANDIDATES = 64
"""Number of sizes tried between half the upper bound and the bound."""


def largest_useful_numel(params: Sequence[ParamSpec], device_budget_bytes: int, with_disk: bool = False) -> int:
    """Return the upper end of the search range, in elements.

    `PIPELINE_CHUNKS` chunks must fit the device budget, and a chunk must not exceed `LARGEST_CHUNK_BYTES` (or
    `LARGEST_CHUNK_BYTES_WITH_DISK`) or the size of all parameters.
    """
    largest = LARGEST_CHUNK_BYTES_WITH_DISK if with_disk else LARGEST_CHUNK_BYTES
    itemsize = max((param.schema.compute.itemsize for param in params), default=1)
    bound = min(device_budget_bytes // PIPELINE_CHUNKS, largest) // itemsize
    total = sum(align(param.numel) for param in params)
    return max(ALIGN_NUMEL, min(bound, total) // ALIGN_NUMEL * ALIGN_NUMEL)


def search_layout(params: Sequence[ParamSpec], device_budget_bytes: int, with_disk: bool = False) -> Layout:
    """Return the layout with the least padding, for chunk sizes between half the largest useful size and that size.

    With several processes these are sizes of chunk groups, because the device holds whole groups. Of two sizes with
    equal padding the larger is chosen, which needs fewer transfers. Limiting the range to a factor of two excludes the
    trivial solution of a private chunk for every parameter.
    """
    nproc = largest_group(param.group for param in params)
    upper = align(-(-largest_useful_numel(params, device_budget_bytes, with_disk) // nproc))
    step = max(ALIGN_NUMEL, align(upper // (2 * CANDIDATES)))
    sizes = range(upper, max(ALIGN_NUMEL, upper // 2) - 1, -step)
    layouts = (build_layout(params, size) for size in sizes)
    # Count the shards of all ranks, so that all ranks choose the same layout.
    return min(layouts, key=lambda layout: sum(chunk.numel * chunk.schema.bytes_per_param for chunk in layout.chunks))
