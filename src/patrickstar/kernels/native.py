"""Rules by the C++ kernel: all in one pass over memory, on the process's pool of threads, without the GIL.

The library has a C interface and knows nothing of PyTorch, so it works with any version of it: addresses go in.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

import patrickstar.kernels
from patrickstar.kernels.rule import Gradient, Rule, Span
from patrickstar.kernels.survey import Survey

LIBRARY = "patrickstar_kernels.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SCALARS = 8
STATES = 2


class _Span(ctypes.Structure):
    """`Span` in native/spans.h."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("earlier", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("states", ctypes.c_void_p * STATES),
        ("scales", ctypes.c_void_p),
        ("scale_count", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        ("param_dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("scalars", ctypes.c_double * SCALARS),
    ]


class Running:
    """An update that the pool is working on. The tensors it reads and writes are kept until it is finished."""

    def __init__(self, library: ctypes.CDLL, handle: int, keep: object) -> None:
        self._library, self._handle, self._keep = library, handle, keep

    def finish(self) -> None:
        """Wait for it."""
        if self._handle:
            handle, self._handle = self._handle, 0
            self._library.patrickstar_finish(handle)
            self._keep = None

    def __del__(self) -> None:
        # An exception may come between start and finish, and the tensors must outlive the update all the same.
        self.finish()


class Native:
    """The C++ kernel. `variant` names the instruction set, `threads` how many of the pool's may work at once.

    Left out, these are the fastest that the machine has, and as many threads as PyTorch uses.
    """

    def __init__(self, library: ctypes.CDLL, variant: str | None = None, threads: int | None = None) -> None:
        self._library = library
        self._variant = variant
        self._threads = threads
        self.name = f"C++ ({variant or self.variants()[0]})"

    @classmethod
    def find(cls, variant: str | None = None, threads: int | None = None) -> "Native | None":
        """The kernel, or None where the package was installed without a C++ compiler."""
        library = _library()
        return None if library is None else cls(library, variant, threads)

    def variants(self) -> list[str]:
        """The instruction sets that this build has and this machine runs, the fastest first."""
        names: list[str] = []
        while (name := self._library.patrickstar_variant(len(names))) is not None:
            names.append(name.decode())
        return names

    @property
    def pool_size(self) -> int:
        """How many threads the process's pool has started."""
        return int(self._library.patrickstar_pool_size())

    @staticmethod
    def takes(span: Span) -> bool:
        """Whether the kernel has this rule for these dtypes, in memory that it can reach."""
        return (
            span.rule.code is not None
            and Native.reads(span.grad)
            and span.master.device.type == "cpu"
            and span.param.device.type == "cpu"
            and span.param.dtype in DTYPES
        )

    @staticmethod
    def reads(grad: Gradient) -> bool:
        """Whether the kernel can survey this gradient."""
        return grad.last.device.type == "cpu" and grad.last.dtype in DTYPES and grad.dtype == torch.float32

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> Running:
        """Begin an update, to be waited for with `finish`."""
        packed, factors = self._pack([span.grad for span in spans], scales)
        scalars: dict[Rule, tuple[float, ...]] = {}
        for target, span in zip(packed, spans, strict=True):
            rule = span.rule
            assert rule.code is not None, f"{type(rule).__name__} is not in the C++ kernel"
            if rule not in scalars:
                scalars[rule] = rule.scalars(torch.float32)
            target.rule, target.mode = rule.code, rule.mode
            target.scalars[: len(scalars[rule])] = scalars[rule]
            target.param, target.param_dtype = span.param.data_ptr(), DTYPES[span.param.dtype]
            target.master = span.master.data_ptr()
            target.states[: len(span.states)] = [state.data_ptr() for state in span.states]
        handle = self._library.patrickstar_start(packed, len(spans), self._count_threads(), self._chosen())
        return Running(self._library, self._checked(handle), (list(spans), factors))

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span: gradients scaled, masters and states in place, parameters rounded."""
        self.start(spans, scales).finish()

    def survey(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> Survey:
        """Sums of squares and non-finite elements of the scaled gradients."""
        packed, _factors = self._pack(gradients, scales)
        sums = (ctypes.c_double * len(gradients))()
        count = self._library.patrickstar_survey(packed, len(packed), self._count_threads(), self._chosen(), sums)
        return Survey(tuple(sums), self._checked(count, nothing=-1))

    def read(self, words: torch.Tensor) -> None:
        """Read a flat tensor of 8-byte words and do nothing with them: what memory gives at most, for benchmarks."""
        self._library.patrickstar_read(words.data_ptr(), words.numel(), self._count_threads())

    @staticmethod
    def _pack(gradients: Sequence[Gradient], scales: Sequence[float]) -> tuple[ctypes.Array[_Span], object]:
        factors = (ctypes.c_double * len(scales))(*scales)
        packed = (_Span * len(gradients))()
        for target, grad in zip(packed, gradients, strict=True):
            target.grad, target.grad_dtype = grad.last.data_ptr(), DTYPES[grad.last.dtype]
            target.earlier = None if grad.earlier is None else grad.earlier.data_ptr()
            target.scales, target.scale_count = ctypes.addressof(factors), len(scales)
            target.numel = grad.numel
        return packed, factors

    def _count_threads(self) -> int:
        return self._threads if self._threads is not None else torch.get_num_threads()

    def _chosen(self) -> bytes | None:
        return self._variant.encode() if self._variant is not None else None

    def _checked(self, result: int | None, nothing: int | None = None) -> int:
        if result == nothing or result is None:
            raise ValueError(f"this machine runs the kernel's variants {self.variants()}, not {self._variant!r}")
        return result


@cache
def _library() -> ctypes.CDLL | None:
    """The shared library beside this file, or where an editable install has put it; None if it was not built."""
    found = [Path(folder) / LIBRARY for folder in patrickstar.kernels.__path__]
    found = [path for path in found if path.exists()]
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    for name, result, arguments in (
        ("span_bytes", ctypes.c_int64, []),
        ("variant", ctypes.c_char_p, [ctypes.c_int]),
        ("pool_size", ctypes.c_int, []),
        ("start", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p]),
        ("finish", None, [ctypes.c_void_p]),
        (
            "survey",
            ctypes.c_int64,
            [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p],
        ),
        ("read", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]),
    ):
        function = getattr(library, f"patrickstar_{name}")
        function.restype, function.argtypes = result, arguments
    assert library.patrickstar_span_bytes() == ctypes.sizeof(_Span), f"{found[0]} was built from other sources"
    return library
