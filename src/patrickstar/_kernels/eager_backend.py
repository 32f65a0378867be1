"""Eager backend: applies update rules with PyTorch's operators, page by page, on any device."""

from collections.abc import Iterator, Sequence

import torch

from patrickstar._kernels.grad_norm import GradStats, block_sums, fold
from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._kernels.split_masters import joined_masters, magnitudes, split_masters
from patrickstar._kernels.update_rule import Gradient, Rule, Span

PAGE_NUMEL = 1 << 18
"""Elements per page, which bounds every temporary (1 MiB in fp32). A multiple of `grad_norm.BLOCK_NUMEL`."""

SPLIT_ITEMS = 6
"""Temporaries of split masters beside those of the rule, of 4 bytes per element of a page: masters, moments, and up to
four of their conversion."""

STATS_BYTES = 4 + 8 + 8 + 2
"""Bytes of temporaries of the statistics, per element of a page: the scaled gradient, its squares and their padded copy
in float64, and which are finite."""


class EagerBackend:
    """Reference backend, which calls `Rule.apply` itself."""

    name = "PyTorch's operators"

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        for span in spans:
            for page in pages(span.numel, span.rule):
                part = span.page(page)
                if part.upper is not None:
                    _update_split(part, part.upper, scales)
                    continue
                old = (part.master, *part.states)
                new = old if part.out is None else part.out
                if part.out is not None:
                    for target, values in zip(new, old, strict=True):
                        target.copy_(values)
                part.rule.apply(new[0], part.grad.scaled(scales), new[1:])
                for values in new:
                    canonical_nan_(values)
                round_into(part.param, new[0])

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        sums, not_finite = [], 0
        for gradient in gradients:
            blocks = [torch.zeros(0, dtype=torch.float64, device=gradient.latest.device)]
            for page in pages(gradient.numel):
                grad = gradient.page(page).scaled(scales)
                not_finite += int((~grad.isfinite()).sum())
                blocks.append(block_sums(grad))
            sums.append(float(fold(torch.cat(blocks))))
        return GradStats(tuple(sums), not_finite)


def _update_split(part: Span, upper: torch.Tensor, scales: Sequence[float]) -> None:
    """Update masters that are restored from both halves. See [Note: split masters]."""
    lower, first, marked, *more = (part.master, *part.states) if part.out is None else part.out
    masters, moments = joined_masters(upper, part.master, part.states[1]), magnitudes(part.states[1])
    if part.out is not None:
        for target, values in zip((first, *more), (part.states[0], *part.states[2:]), strict=True):
            target.copy_(values)
    part.rule.apply(masters, part.grad.scaled(scales), (first, moments, *more))
    for values in (masters, first, moments, *more):
        canonical_nan_(values)
    split_masters(masters, moments, part.param, lower, marked)


def pages(numel: int, rule: Rule | None = None) -> Iterator[slice]:
    """Yield slices of one page each, or a single slice if the rule does not allow pages."""
    step = PAGE_NUMEL if rule is None or rule.by_pages else max(1, numel)
    return (slice(first, first + step) for first in range(0, numel, step))
