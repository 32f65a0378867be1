"""Which implementation updates what. All give the same bits: see [Note: the same bits everywhere]."""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Protocol

import torch

from patrickstar._kernels.cpp_backend import CppBackend, Running, Unavailable
from patrickstar._kernels.eager_backend import PAGE_NUMEL, WORKSPACE_ITEMS, EagerBackend
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Rule, Span


class Backend(Protocol):
    """What updates spans and surveys their gradients."""

    name: str

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span: gradients scaled, masters and states in place, parameters rounded."""

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        """Sums of squares, in the order of `gradients`, and non-finite elements of the scaled gradients."""


class Kernels:
    """The fastest implementation for each span: C++ on the host, Triton on a GPU, and the written list for the rest."""

    def __init__(self, native: CppBackend | None, fused: TritonBackend | None = None) -> None:
        self.native = native
        self.fused = fused
        self.listed = EagerBackend()

    @classmethod
    def best(cls, device: torch.device) -> "Kernels":
        """What this installation offers where the compute device is this one; says so once where a kernel is missing.

        With a GPU that is both: chunks are updated where they lie.
        """
        native, fused = None, None
        try:
            native = CppBackend.load()
        except Unavailable as error:
            _warn_missing("C++ kernel", str(error))
        try:
            fused = TritonBackend.load(device) if device.type == "cuda" else None
        except Unavailable as error:
            _warn_missing("Triton kernel", str(error))
        return cls(native, fused)

    def for_update(self, span: Span) -> Backend:
        """What updates this span."""
        for one in (self.native, self.fused):
            if one is not None and one.supports(span):
                return one
        return self.listed

    def for_grad_stats(self, grad: Gradient) -> Backend:
        """What surveys this gradient."""
        for one in (self.native, self.fused):
            if one is not None and one.supports_gradient(grad):
                return one
        return self.listed

    def has_kernel(self, device: torch.device) -> bool:
        """Whether updates on a device have a kernel, and need no memory beside chunks."""
        return (self.native if device.type == "cpu" else self.fused) is not None

    def workspace_bytes(self, rule: Rule, device: torch.device, dtype: torch.dtype, numel: int) -> int:
        """What updating a parameter of `numel` elements takes beside chunks, on a device, for masters of a dtype."""
        if self.has_kernel(device) and rule.code is not None and dtype == torch.float32:
            return 0
        return min(numel, PAGE_NUMEL if rule.by_pages else numel) * WORKSPACE_ITEMS * dtype.itemsize

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Running]:
        """Update every span; what the C++ kernel does may still be running, and must be waited for."""
        running: list[Running] = []
        try:
            for implementation, some in groupby(spans, self.for_update):
                if isinstance(implementation, CppBackend):
                    running.append(implementation.start(list(some), scales))
                else:
                    implementation.update(list(some), scales)
        except BaseException:
            for one in running:
                one.finish()
            raise
        return running

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span."""
        for running in self.start(spans, scales):
            running.finish()

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        """Look at all gradients."""
        found = (
            implementation.grad_stats(list(some), scales)
            for implementation, some in groupby(gradients, self.for_grad_stats)
        )
        return GradStats.joined(found)


@cache
def _warn_missing(what: str, why: str) -> None:
    warnings.warn(
        f"PatrickStar runs without its {what}: those updates run on PyTorch's operators, with the same bits but "
        f"several times slower. {why[:1].upper()}{why[1:]}",
        stacklevel=2,
    )
