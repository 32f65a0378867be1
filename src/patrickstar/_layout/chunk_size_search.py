"""The chunk-size search (PatrickStar §6.1): of a range of sizes, the one that wastes least."""

from collections.abc import Sequence

from patrickstar._layout.chunk_mapping import ALIGN_NUMEL, Layout, ParamSpec, align, build_layout

PIPELINE_CHUNKS = 4
"""Chunks that the device should hold at once: two an operator uses, one that comes, one that goes."""

LARGEST_CHUNK_BYTES = 64 * 1024**2
"""Where a copy's fixed cost is long lost in its transfer time; larger chunks only coarsen eviction."""

LARGEST_CHUNK_BYTES_WITH_DISK = 8 * 1024**2
"""Two pages. What lies in one chunk becomes new together: the first layers' parameters are updated last and needed
first, and the less lies beside them, the less waits for a disk. Pages move one by one, so small chunks cost nothing."""

CANDIDATES = 64
"""Sizes tried between half the upper bound and the bound."""


def largest_useful_numel(params: Sequence[ParamSpec], device_budget_bytes: int, with_disk: bool = False) -> int:
    """The upper end of the search range, in elements.

    A chunk no larger than what lets `PIPELINE_CHUNKS` of them lie on the device, than `LARGEST_CHUNK_BYTES` (or that
    `WITH_DISK`), or than all parameters together.
    """
    largest = LARGEST_CHUNK_BYTES_WITH_DISK if with_disk else LARGEST_CHUNK_BYTES
    itemsize = max((param.schema.compute.itemsize for param in params), default=1)
    bound = min(device_budget_bytes // PIPELINE_CHUNKS, largest) // itemsize
    total = sum(align(param.numel) for param in params)
    return max(ALIGN_NUMEL, min(bound, total) // ALIGN_NUMEL * ALIGN_NUMEL)


def search_layout(
    params: Sequence[ParamSpec], device_budget_bytes: int, with_disk: bool = False, nproc: int = 1, rank: int = 0
) -> Layout:
    """The layout with the least padding over chunk sizes from half the largest useful size up to it.

    With several processes it is a group that has this size, since groups are what the device holds.
    Of two sizes that waste the same, the larger is taken: fewer moves. A range of a factor of two keeps the search
    from the trivial answer, a private chunk for every parameter.
    """
    upper = align(-(-largest_useful_numel(params, device_budget_bytes, with_disk) // nproc))
    step = max(ALIGN_NUMEL, align(upper // (2 * CANDIDATES)))
    sizes = range(upper, max(ALIGN_NUMEL, upper // 2) - 1, -step)
    layouts = (build_layout(params, size, nproc, rank) for size in sizes)
    # Of all processes' parts together, so that all find the same.
    return min(layouts, key=lambda layout: sum(chunk.numel * chunk.schema.bytes_per_param for chunk in layout.chunks))
