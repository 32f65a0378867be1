"""Triton backend: one pass over device memory per update."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType

import torch

from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.cpp_backend import Unavailable
from patrickstar._kernels.grad_norm import BLOCK_NUMEL, GradStats
from patrickstar._kernels.update_rule import Gradient, Rule, Span, joined, rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROGRAM_NUMEL = 1024
"""Elements per program of an update: 8 per thread of 4 warps, which is 16 bytes of 16-bit floats."""
PROGRAM_BLOCKS = 4
"""Blocks per program of the gradient statistics: each warp reads the rows of one block."""
LAUNCH_COUNT = 256
"""Gradients per launch of the statistics at most: each program reads that many numbers to find its own."""
LAUNCH_NUMEL = 1 << 28
"""Elements per launch of the statistics, or one gradient: its block sums take 0.8 MB."""
EXACT = {"num_warps": 4, "enable_fp_fusion": False}
"""Launch options of every kernel. See [Note: Triton's arithmetic]."""


class TritonBackend:
    """Updates and gradient statistics by Triton kernels. For tests, `TRITON_INTERPRET=1` runs them slowly on a CPU."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self.name = "Triton (interpreted)" if kernels.INTERPRETED else "Triton"

    @classmethod
    def load(cls, device: torch.device) -> "TritonBackend":
        """Load the kernels and run one on a single element. Raises Unavailable with the reason if that fails."""
        if find_spec("triton") is None:
            raise Unavailable("triton is not installed: pip install triton")
        try:
            kernels = _kernels()
            assert kernels is not None, "triton can't be imported"
            backend, element = cls(kernels), torch.zeros(1, device=device)
            backend.grad_stats([Gradient(element)], ())
        except Exception as error:  # Triton, its compiler and the driver raise many types
            raise Unavailable(f"Triton does not work here: {type(error).__name__}: {error}") from error
        return backend

    @classmethod
    def find(cls) -> "TritonBackend | None":
        """Load the kernels, or return None if Triton is not installed."""
        kernels = _kernels()
        return None if kernels is None else cls(kernels)

    @staticmethod
    def supports(span: Span) -> bool:
        """Return True if the kernels implement the rule for these dtypes, in place, with all tensors on one device."""
        return (
            span.out is None
            and span.rule.code is not None
            and not isinstance(span.rule, AveragedRule)
            and TritonBackend.supports_gradient(span.grad)
            and span.master.device == span.param.device == span.grad.latest.device
            and span.param.dtype in DTYPES
        )

    @staticmethod
    def supports_gradient(grad: Gradient) -> bool:
        kernels = _kernels()
        return (
            kernels is not None
            and grad.latest.device.type == ("cpu" if kernels.INTERPRETED else "cuda")
            and grad.latest.dtype in DTYPES
            and grad.dtype == torch.float32
        )

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        factors = _factors(scales)
        scalars: dict[Rule, tuple[float, ...]] = {}
        for span in joined(spans):
            rule = span.rule
            assert rule.code is not None, f"{type(rule).__name__} is not among Triton's kernels"
            if rule not in scalars:
                scalars[rule] = rule.scalars(torch.float32)
            first_state, second_state, *_ = (*span.states, None, None)
            with torch.cuda.device_of(span.master):
                self._kernels.update_kernel[(-(-span.numel // PROGRAM_NUMEL),)](
                    span.param,
                    span.upper,
                    span.grad.latest,
                    span.grad.accumulated,
                    span.master,
                    first_state,
                    second_state,
                    span.numel,
                    scalars[rule],
                    factors,
                    rule=rule.code,
                    mode=rule.mode,
                    program_numel=PROGRAM_NUMEL,
                    **EXACT,
                )

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        """Return the statistics of the scaled gradients, all of which must be on one device."""
        if not gradients:
            return GradStats()
        factors = _factors(scales)
        results = [self._grad_stats(group, factors) for group in _launches(gradients)]
        # The only synchronization of the host with the device.
        sums, counts = (torch.cat(values).tolist() for values in zip(*results, strict=True))
        return GradStats(tuple(sums), sum(counts))

    def _grad_stats(
        self, gradients: Sequence[Gradient], factors: tuple[float, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of squares of each gradient, and the number of non-finite elements of all."""
        first, device = gradients[0], gradients[0].latest.device
        programs = [-(-grad.numel // (PROGRAM_BLOCKS * BLOCK_NUMEL)) for grad in gradients]
        firsts = list(accumulate(programs, initial=0))
        total, count = firsts.pop(), 1 << (len(gradients) - 1).bit_length()
        rows = [
            firsts,
            [grad.numel for grad in gradients],
            [_elements_between(first.latest, grad.latest) for grad in gradients],
            [_elements_between(first.accumulated, grad.accumulated) for grad in gradients],
        ]
        padding = [total] * (count - len(gradients))  # no program begins there
        table = torch.tensor([row + padding for row in rows], dtype=torch.int64, device="cpu")
        table = table.to(device, non_blocking=True)
        sums = torch.empty(total * PROGRAM_BLOCKS, dtype=torch.float64, device=device)
        not_finite = torch.empty(total * PROGRAM_BLOCKS, dtype=torch.int32, device=device)
        totals = torch.empty(len(gradients), dtype=torch.float64, device=device)
        sizes = {"count": count, "blocks": PROGRAM_BLOCKS}
        with torch.cuda.device_of(first.latest):
            if total:
                self._kernels.grad_stats_kernel[(total,)](
                    first.latest, first.accumulated, table, factors, sums, not_finite, **sizes, **EXACT
                )
            self._kernels.fold_kernel[(len(gradients),)](sums, table, totals, **sizes, **EXACT)
        return totals, not_finite.sum(dim=0, keepdim=True)


def _launches(gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    """Divide gradients into those of one launch: of the same dtypes, and of a bounded number of block sums."""
    group: list[Gradient] = []
    numel = 0
    for grad in gradients:
        numel += grad.numel
        if group and (_kind(grad) != _kind(group[0]) or len(group) == LAUNCH_COUNT or numel > LAUNCH_NUMEL):
            yield group
            group, numel = [], grad.numel
        group.append(grad)
    yield group


def _kind(grad: Gradient) -> tuple[torch.dtype, bool]:
    return grad.latest.dtype, grad.accumulated is None


def _elements_between(first: torch.Tensor | None, second: torch.Tensor | None) -> int:
    """Return how many elements behind the begin of a tensor another one of its dtype begins."""
    if first is None or second is None:
        return 0
    return (second.data_ptr() - first.data_ptr()) // first.itemsize


def _factors(scales: Sequence[float]) -> tuple[float, ...]:
    return tuple(rounded(scale, torch.float32) for scale in scales)


@cache
def _kernels() -> ModuleType | None:
    try:
        from patrickstar._kernels import triton_kernels
    except ImportError:
        return None
    return triton_kernels
