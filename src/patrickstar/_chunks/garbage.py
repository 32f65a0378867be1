"""Tensors in unreachable reference cycles: until Python collects them, they take part of the device budget."""

import gc
from collections.abc import Sequence

from patrickstar._chunks.tracer import Tracer
from patrickstar._tiers.chunk import Chunk


def free_garbage(tracer: Tracer, chunks: Sequence[Chunk]) -> bool:
    """Free such tensors, since there is no room for an access, and measure again; return whether that made room.

    Linked processes do not, since they evict alike.

    Args:
        tracer: Tracer of the moment that has begun.
        chunks: Chunks that are accessed.
    """
    if tracer.linked is not None:
        return False
    device = tracer.manager.device_tier
    before_bytes = device.non_model_bytes
    gc.collect()
    if tracer.followed is None or not tracer.expect_traced(tuple(chunk.index for chunk in chunks)):
        tracer.measure()
    return device.non_model_bytes < before_bytes
