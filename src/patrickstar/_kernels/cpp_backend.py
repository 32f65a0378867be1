"""Rules by the C++ kernel: all in one pass over memory, on the process's pool of threads, without the GIL.

The library has a C interface and knows nothing of PyTorch, so it works with any version of it: addresses go in.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

import patrickstar._kernels
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.update_rule import Gradient, Rule, Span

LIBRARY = "patrickstar_kernels.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SCALARS = 8
STATES = 2
NO_VARIANT, NO_MEMORY = -1, -2
"""What the library's functions return where they could not begin."""


class _Span(ctypes.Structure):
    """`Span` in cpp/spans.h."""

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


class Unavailable(Exception):
    """A kernel can't be used here; the message says why, and what to do."""


class Running:
    """An update that the pool is working on. The tensors it reads and writes are kept until it is finished."""

    def __init__(self, library: ctypes.CDLL, keep: object) -> None:
        self._library, self._keep = library, keep
        self.handle = ctypes.c_void_p()  # written by the library itself, so that no exception can come in between

    def finish(self) -> None:
        """Wait for it."""
        if self.handle:
            handle, self.handle = self.handle, ctypes.c_void_p()
            self._library.patrickstar_finish(handle)
        self._keep = None

    def __del__(self) -> None:
        # An exception may come between start and finish, and the tensors must outlive the update all the same.
        self.finish()


class CppBackend:
    """The C++ kernel. `variant` names the instruction set, `threads` how many of the pool's may work at once.

    Left out, these are the fastest that the machine has, and as many threads as PyTorch uses.
    """

    def __init__(self, library: ctypes.CDLL, variant: str | None = None, threads: int | None = None) -> None:
        self._library = library
        self._variant = variant
        self._threads = threads
        self.name = f"C++ ({variant or self.variants()[0]})"

    @classmethod
    def load(cls) -> "CppBackend":
        """The kernel. Raises Unavailable where the package was installed without it, or it can't be loaded."""
        return cls(_library())

    @classmethod
    def find(cls, variant: str | None = None, threads: int | None = None) -> "CppBackend | None":
        """The same, or None."""
        try:
            return cls(_library(), variant, threads)
        except Unavailable:
            return None

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
    def supports(span: Span) -> bool:
        """Whether the kernel has this rule for these dtypes, in memory that it can reach."""
        return (
            span.rule.code is not None
            and CppBackend.supports_gradient(span.grad)
            and span.master.device.type == "cpu"
            and span.param.device.type == "cpu"
            and span.param.dtype in DTYPES
        )

    @staticmethod
    def supports_gradient(grad: Gradient) -> bool:
        """Whether the kernel can survey this gradient."""
        return grad.latest.device.type == "cpu" and grad.latest.dtype in DTYPES and grad.dtype == torch.float32

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> Running:
        """Begin an update, to be waited for with `finish`."""
        packed = self._pack([span.grad for span in spans])
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
        running = Running(self._library, list(spans))
        self._check(
            self._library.patrickstar_start(
                packed, len(spans), *_doubles(scales), *self._how(), ctypes.byref(running.handle)
            )
        )
        return running

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update every span: gradients scaled, masters and states in place, parameters rounded."""
        self.start(spans, scales).finish()

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        """Sums of squares and non-finite elements of the scaled gradients."""
        packed, sums, not_finite = self._pack(gradients), (ctypes.c_double * len(gradients))(), ctypes.c_int64()
        self._check(
            self._library.patrickstar_survey(
                packed, len(packed), *_doubles(scales), *self._how(), sums, ctypes.byref(not_finite)
            )
        )
        return GradStats(tuple(sums), not_finite.value)

    def read(self, words: torch.Tensor) -> None:
        """Read a flat tensor of 8-byte words and do nothing with them: what memory gives at most, for benchmarks."""
        self._library.patrickstar_read(words.data_ptr(), words.numel(), self._how()[0])

    @staticmethod
    def _pack(gradients: Sequence[Gradient]) -> ctypes.Array[_Span]:
        packed = (_Span * len(gradients))()
        for target, grad in zip(packed, gradients, strict=True):
            target.grad, target.grad_dtype = grad.latest.data_ptr(), DTYPES[grad.latest.dtype]
            target.earlier = None if grad.accumulated is None else grad.accumulated.data_ptr()
            target.numel = grad.numel
        return packed

    def _how(self) -> tuple[int, bytes | None]:
        """Threads and variant, as the library takes them."""
        threads = self._threads if self._threads is not None else torch.get_num_threads()
        return threads, self._variant.encode() if self._variant is not None else None

    def _check(self, status: int) -> None:
        if status == NO_VARIANT:
            raise ValueError(f"this machine runs the kernel's variants {self.variants()}, not {self._variant!r}")
        if status == NO_MEMORY:
            raise MemoryError("the C++ kernel found no memory for its list of pages")


def _doubles(values: Sequence[float]) -> tuple[ctypes.Array[ctypes.c_double], int]:
    return (ctypes.c_double * len(values))(*values), len(values)


@cache
def _library() -> ctypes.CDLL:
    """The shared library, which lies beside this file, or where an editable install has put it."""
    folders = [Path(folder) for folder in patrickstar._kernels.__path__]
    found = [folder / LIBRARY for folder in folders if (folder / LIBRARY).exists()]
    if not found:
        raise Unavailable(
            "it was not built when the package was installed: that takes a C++ compiler (Debian, Ubuntu: "
            "apt install g++). Install the package again, from where it came, with `pip install --no-cache-dir -v`"
        )
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise Unavailable(f"{found[0]} can't be loaded: {error}") from error
    number, text, address, count = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64
    call = [address, count, address, count, number, text]
    for name, result, arguments in (
        ("sources", text, []),
        ("span_bytes", count, []),
        ("variant", text, [number]),
        ("pool_size", number, []),
        ("start", count, [*call, address]),
        ("finish", None, [address]),
        ("survey", count, [*call, address, address]),
        ("read", ctypes.c_uint64, [address, count, number]),
    ):
        function = getattr(library, f"patrickstar_{name}")
        function.restype, function.argtypes = result, arguments
    sources = next((folder / "cpp" for folder in folders if (folder / "cpp").is_dir()), None)
    differs = sources is not None and library.patrickstar_sources().decode() != _digest(sources)
    if differs or library.patrickstar_span_bytes() != ctypes.sizeof(_Span):
        raise Unavailable(f"{found[0]} was built from other sources than these: install the package again")
    return library


def _digest(folder: Path) -> str:
    """What the build puts into the library to say which sources it is made of."""
    sources = sorted(
        path for path in folder.iterdir() if path.suffix in (".cpp", ".h") or path.name == "CMakeLists.txt"
    )
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return hashlib.sha256(digests.encode()).hexdigest()
