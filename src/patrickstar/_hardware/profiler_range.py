"""Named ranges for `torch.profiler`: what the engine does, to which chunk or parameter."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def is_profiling() -> bool:
    """Return True while a profiler runs. Names that cost time are built only then."""
    return bool(profiler._is_profiler_enabled)


def profiler_range(work: str, subject: object) -> AbstractContextManager[Any]:
    """Return a context that shows as `patrickstar::work subject` in a running profiler, else one that does nothing."""
    if not is_profiling():
        return _NO_RANGE
    return profiler.record_function(f"patrickstar::{work} {subject}")
