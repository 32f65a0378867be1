"""Choice of a backend for each update. All give the same bits: see [Note: bitwise-identical backends]."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import groupby
from typing import Protocol

import torch

from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._kernels.eager_backend import PAGE_NUMEL, SPLIT_ITEMS, STATS_BYTES, EagerBackend
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.triton_backend import TritonBackend
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._schedule.step_timeline import Channel
from patrickstar._tiers.timeline import Timeline


class Backend(Protocol):
    """Implementation of updates and gradient statistics."""

    name: str

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Scale the gradients, update masters and states in place or into `out`, and store the rounded parameters."""

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        """Return the statistics of the scaled gradients, with sums of squares in the order of `gradients`."""


class Kernels:
    """Dispatcher to the fastest backend for each span: C++ on the host, Triton on a GPU, eager otherwise."""

    def __init__(self, cpp: CppBackend | None, triton: TritonBackend | None = None) -> None:
        self.cpp = cpp
        self.triton = triton
        self.eager = EagerBackend()
        self.timeline: Timeline | None = None
        """Recorder of the step, if it is recorded."""

    @classmethod
    def best(cls, device: torch.device) -> "Kernels":
        """Load all backends that work here for this compute device, and warn once about each missing one.

        With a GPU both backends are used, because each chunk is updated on the tier that holds it.
        """
        cpp, triton = None, None
        try:
            cpp = CppBackend.load()
        except Unavailable as error:
            _warn_missing("C++ kernel", str(error))
        try:
            triton = TritonBackend.load(device) if device.type == "cuda" else None
        except Unavailable as error:
            _warn_missing("Triton kernel", str(error))
        return cls(cpp, triton)

    def for_update(self, span: Span) -> Backend:
        for backend in (self.cpp, self.triton):
            if backend is not None and backend.supports(span):
                return backend
        return self.eager

    def is_concurrent(self, span: Span) -> bool:
        """Return whether `start` returns while an update of this span runs."""
        return isinstance(self.for_update(span), CppBackend)

    def for_grad_stats(self, grad: Gradient) -> Backend:
        for backend in (self.cpp, self.triton):
            if backend is not None and backend.supports_gradient(grad):
                return backend
        return self.eager

    def has_kernel(self, device: torch.device) -> bool:
        """Return True if updates on a device run on a compiled backend, which needs no workspace."""
        return (self.cpp if device.type == "cpu" else self.triton) is not None

    def workspace_bytes(
        self, rule: Rule, device: torch.device, dtype: torch.dtype, numel: int, *, splits: bool = False
    ) -> int:
        """Return the workspace bytes for updating a parameter of `numel` elements.

        Args:
            dtype: The master's.
            splits: Masters are split.
        """
        has_kernel = self.has_kernel(device) and (device.type == "cpu" or not isinstance(rule, AveragedRule))
        if has_kernel and rule.code is not None and dtype == torch.float32:
            return 0
        items = rule.workspace_items + SPLIT_ITEMS * splits
        return min(numel, PAGE_NUMEL if rule.by_pages else numel) * items * dtype.itemsize

    def stats_workspace_bytes(self, device: torch.device, numel: int) -> int:
        """Return the workspace bytes of the statistics of gradients on a device, of which the longest has `numel`."""
        return 0 if self.has_kernel(device) else min(numel, PAGE_NUMEL) * STATS_BYTES

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Transfer]:
        """Update every span. The returned C++ updates may still be running; the caller must call `wait`."""
        running: list[Transfer] = []
        try:
            for backend, group in groupby(spans, self.for_update):
                if isinstance(backend, CppBackend):  # see `is_concurrent`
                    running.append(backend.start(list(group), scales))
                else:
                    backend.update(list(group), scales)
        except BaseException:
            for update in running:
                update.wait()
            raise
        return running

    def start_after(self, copies: Sequence[Transfer], spans: Sequence[Span], scales: Sequence[float]) -> list[Transfer]:
        """Update every span as `start` does, once copies of its tensors have ended."""
        for copy in copies:
            copy.wait()
        return self.start(spans, scales)

    def observed(self, spans: Sequence[Span]) -> AbstractContextManager[None]:
        """Return a context for an update of these spans, which notes its part on the host if the step is recorded."""
        timeline = self.timeline  # another thread may replace it
        if timeline is None:
            return nullcontext()
        on_host = [span for span in spans if span.master.device.type == "cpu"]
        nbytes = sum(each.nbytes for span in on_host for each in (span.param, span.master, *span.states))
        names = list(dict.fromkeys(span.name for span in on_host))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return timeline.busy(Channel.UPDATE, names[0] + more if names else "", nbytes)

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span and wait for completion."""
        with self.observed(spans):
            for backend, group in groupby(spans, self.for_update):
                backend.update(list(group), scales)

    def update_together(self, spans: Sequence[Span], update: Callable[[], None]) -> None:
        """Call `update`, which updates every span."""
        with self.observed(spans):
            update()

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        groups = groupby(gradients, self.for_grad_stats)
        return GradStats.merge(backend.grad_stats(list(group), scales) for backend, group in groups)


@cache
def _warn_missing(kernel: str, reason: str) -> None:
    warnings.warn(
        f"PatrickStar runs without its {kernel}: the affected updates use PyTorch's operators, which give the same "
        f"bits but are several times slower. {reason[:1].upper()}{reason[1:]}",
        stacklevel=2,
    )
