"""The chunk-size search (PatrickStar §6.1): of a range of sizes, the one that wastes least."""

from collections.abc import Sequence

from patrickstar.layout.mapping import ALIGN_NUMEL, Layout, ParamSpec, align, build_layout

PIPELINE_CHUNKS = 4
"""Chunks that the device should hold at once: two an operator uses, one that comes, one that goes."""

LARGEST_CHUNK_BYTES = 64 * 1024**2
"""Where a copy's fixed cost is long lost in its transfer time; larger chunks only coarsen eviction."""

CANDIDATES = 64
"""Sizes tried between half the upper bound and the bound."""


def largest_useful_numel(params: Sequence[ParamSpec], device_budget_bytes: int) -> int:
    """The upper end of the search range, in elements.

    A chunk no larger than what lets `PIPELINE_CHUNKS` of them lie on the device, than `LARGEST_CHUNK_BYTES`, or than
    all parameters together.
    """
    itemsize = max((param.scheme.compute.itemsize for param in params), default=1)
    bound = min(device_budget_bytes // PIPELINE_CHUNKS, LARGEST_CHUNK_BYTES) // itemsize
    total = sum(align(param.numel) for param in params)
    return max(ALIGN_NUMEL, min(bound, total) // ALIGN_NUMEL * ALIGN_NUMEL)


def search_layout(params: Sequence[ParamSpec], device_budget_bytes: int) -> Layout:
    """The layout with the least padding over chunk sizes from half the largest useful size up to it.

    Of two sizes that waste the same, the larger is taken: fewer moves. A range of a factor of two keeps the search
    from the trivial answer, a private chunk for every parameter.
    """
    upper = largest_useful_numel(params, device_budget_bytes)
    step = max(ALIGN_NUMEL, align(upper // (2 * CANDIDATES)))
    sizes = range(upper, max(ALIGN_NUMEL, upper // 2) - 1, -step)
    return min((build_layout(params, size) for size in sizes), key=lambda layout: layout.padding_bytes)
