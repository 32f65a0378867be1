"""Rules by PyTorch's operators, page by page: the written list itself, on any device."""

from collections.abc import Iterator, Sequence

import torch

from patrickstar._kernels.grad_norm import GradStats, block_sums, fold
from patrickstar._kernels.rounding import canonical_nan_, round_into
from patrickstar._kernels.update_rule import Gradient, Rule, Span

PAGE_NUMEL = 1 << 18
"""Elements that are worked on at a time: no temporary is larger (1 MiB in fp32). A multiple of a survey's block."""

WORKSPACE_ITEMS = 6
"""The most temporaries of a page's length that are alive at once, in numbers of the master's dtype (Lion's, 5.25)."""


class EagerBackend:
    """Runs `Rule.apply` as it is written."""

    name = "PyTorch's operators"

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span: gradients scaled, masters and states in place, parameters rounded."""
        for span in spans:
            for page in pages(span.numel, span.rule):
                part = span.page(page)
                part.rule.apply(part.master, part.grad.scaled(scales), part.states)
                for values in (part.master, *part.states):
                    canonical_nan_(values)
                round_into(part.param, part.master)

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        """Sums of squares and non-finite elements of the scaled gradients."""
        sums, not_finite = [], 0
        for gradient in gradients:
            blocks = [torch.zeros(0, dtype=torch.float64, device=gradient.latest.device)]
            for page in pages(gradient.numel):
                grad = gradient.page(page).scaled(scales)
                not_finite += int((~grad.isfinite()).sum())
                blocks.append(block_sums(grad))
            sums.append(float(fold(torch.cat(blocks))))
        return GradStats(tuple(sums), not_finite)


def pages(numel: int, rule: Rule | None = None) -> Iterator[slice]:
    """So many elements, a page at a time, or all at once where a rule wants them so."""
    step = PAGE_NUMEL if rule is None or rule.by_pages else max(1, numel)
    return (slice(first, first + step) for first in range(0, numel, step))
