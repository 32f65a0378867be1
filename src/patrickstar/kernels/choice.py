"""Which implementation updates what. All give the same bits: see [Note: the same bits everywhere]."""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Protocol

import torch

from patrickstar.kernels.listed import PAGE_NUMEL, WORKSPACE_ITEMS, Listed
from patrickstar.kernels.native import Native, Running
from patrickstar.kernels.rule import Gradient, Rule, Span
from patrickstar.kernels.survey import Survey


class Implementation(Protocol):
    """What updates spans and surveys their gradients."""

    name: str

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span: gradients scaled, masters and states in place, parameters rounded."""

    def survey(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> Survey:
        """Sums of squares, in the order of `gradients`, and non-finite elements of the scaled gradients."""


class Kernels:
    """The fastest implementation for each span: C++ on the host, PyTorch's operators for what that does not have."""

    def __init__(self, native: Native | None) -> None:
        self.native = native
        self.listed = Listed()

    @classmethod
    def best(cls) -> "Kernels":
        """What this installation offers; says so once where that is not the C++ kernel."""
        native = Native.find()
        if native is None:
            _say_fallback()
        return cls(native)

    def for_update(self, span: Span) -> Implementation:
        """What updates this span."""
        return self.native if self.native is not None and self.native.takes(span) else self.listed

    def for_survey(self, grad: Gradient) -> Implementation:
        """What surveys this gradient."""
        return self.native if self.native is not None and self.native.reads(grad) else self.listed

    def workspace_bytes(self, rule: Rule, device: torch.device, dtype: torch.dtype, numel: int) -> int:
        """What updating a parameter of `numel` elements takes beside chunks, on a device, for masters of a dtype."""
        if self.native is not None and rule.code is not None and device.type == "cpu" and dtype == torch.float32:
            return 0
        return min(numel, PAGE_NUMEL if rule.by_pages else numel) * WORKSPACE_ITEMS * dtype.itemsize

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Running]:
        """Update every span; what the C++ kernel does may still be running, and must be waited for."""
        running = []
        for implementation, some in groupby(spans, self.for_update):
            if isinstance(implementation, Native):
                running.append(implementation.start(list(some), scales))
            else:
                implementation.update(list(some), scales)
        return running

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span."""
        for running in self.start(spans, scales):
            running.finish()

    def survey(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> Survey:
        """Look at all gradients."""
        found = (
            implementation.survey(list(some), scales) for implementation, some in groupby(gradients, self.for_survey)
        )
        return Survey.joined(found)


@cache
def _say_fallback() -> None:
    warnings.warn(
        "PatrickStar was installed without its C++ kernel, as no compiler was found: updates run on PyTorch's "
        "operators, with the same bits but several times slower. `patrickstar doctor` says how to change that",
        stacklevel=2,
    )
