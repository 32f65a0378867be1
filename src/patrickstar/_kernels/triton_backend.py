"""Triton backend: one pass over device memory per update."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.cpp_backend import Unavailable
from patrickstar._kernels.grad_norm import BLOCK_NUMEL, GradStats
from patrickstar._kernels.update_rule import Gradient, Rule, Span, rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROGRAM_NUMEL = 1024
"""Elements per program of an update: 8 per thread of 4 warps, which is 16 bytes of 16-bit floats."""
PROGRAM_BLOCKS = 4
"""Blocks per program of the gradient statistics: each warp reads the rows of one block."""
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
        for span in spans:
            rule = span.rule
            assert rule.code is not None, f"{type(rule).__name__} is not among Triton's kernels"
            if span.numel == 0:
                continue
            if rule not in scalars:
                scalars[rule] = rule.scalars(torch.float32)
            first_state, second_state, *_ = (*span.states, None, None)
            with torch.cuda.device_of(span.master):
                self._kernels.update_kernel[(-(-span.numel // PROGRAM_NUMEL),)](
                    span.param,
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
        results = [self._grad_stats(grad, factors) for grad in gradients]
        # The only synchronization of the host with the device.
        sums, counts = (torch.cat(values).tolist() for values in zip(*results, strict=True))
        return GradStats(tuple(sums), sum(counts))

    def _grad_stats(self, grad: Gradient, factors: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        device, blocks = grad.latest.device, -(-grad.numel // BLOCK_NUMEL)
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if blocks == 0:
            return total, torch.zeros(1, dtype=torch.int64, device=device)
        sums = torch.empty(blocks, dtype=torch.float64, device=device)
        not_finite = torch.empty(blocks, dtype=torch.int32, device=device)
        with torch.cuda.device_of(grad.latest):
            self._kernels.grad_stats_kernel[(-(-blocks // PROGRAM_BLOCKS),)](
                grad.latest, grad.accumulated, grad.numel, factors, sums, not_finite, blocks=PROGRAM_BLOCKS, **EXACT
            )
            self._kernels.fold_kernel[(1,)](sums, blocks, total, **EXACT)
        return total, not_finite.sum(dim=0, keepdim=True)


def _factors(scales: Sequence[float]) -> tuple[float, ...]:
    return tuple(rounded(scale, torch.float32) for scale in scales)


@cache
def _kernels() -> ModuleType | None:
    try:
        from patrickstar._kernels import triton_kernels
    except ImportError:
        return None
    return triton_kernels
