"""Tensors in unreachable reference cycles: until Python collects them, they take part of the device budget."""

import gc
from collections.abc import Callable, Sequence

from patrickstar._chunks.tracer import Tracer
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError


def run_in_budget(run: Callable[[], None], tracer: Tracer, chunks: Sequence[Chunk], *, once: bool = False) -> None:
    """Make room by `run`; if that fails, free such tensors, measure again, and run it once more.

    Linked processes do not, since they evict alike.

    Args:
        run: Makes room for an access of the moment that has begun.
        tracer: Tracer of the moment.
        chunks: Chunks that are accessed.
        once: Do not try again: the caller can make room otherwise.

    Raises:
        BudgetError: There is no room.
    """
    try:
        run()
    except BudgetError:
        if once or tracer.linked is not None:
            raise
        device = tracer.manager.device_tier
        before_bytes = device.non_model_bytes
        gc.collect()
        if tracer.followed is None or not tracer.expect_traced(tuple(chunk.index for chunk in chunks)):
            tracer.measure()
        if device.non_model_bytes >= before_bytes:
            raise
        run()
