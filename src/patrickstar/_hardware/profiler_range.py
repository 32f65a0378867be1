"""Named ranges for `torch.profiler`: what the engine does, to which chunk or parameters."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def profiler_range(work: str, *subjects: object) -> AbstractContextManager[Any]:
    """Return a context that shows as `patrickstar::work subjects` in a running profiler, else one that does nothing."""
    if not profiler._is_profiler_enabled:
        return _NO_RANGE
    return profiler.record_function(f"patrickstar::{work} {', '.join(map(str, subjects))}")
