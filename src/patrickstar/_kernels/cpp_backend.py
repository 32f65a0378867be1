"""C++ backend: one pass over host memory per update, on a thread pool of the process, without holding the GIL.

The library has a C interface that takes addresses and does not link PyTorch, so it works with any PyTorch version.
"""

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

import patrickstar._kernels
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._tiers.page_codec import PageCodec

LIBRARY = "patrickstar_kernels.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SCALARS = 9
LISTS = 4
"""Lists of an update: master, two states, and the moving average, which is always the last."""
NO_VARIANT, NO_MEMORY = -1, -2
"""Error codes of the library's functions."""


_SPAN = struct.Struct(f"@PPPP{LISTS}P{LISTS}PPqqiiii{SCALARS}dd")
"""`Span` in cpp/spans.h. The library sets its scales, given as null and 0 here."""
_NO_LISTS = (0,) * LISTS
_NO_RULE = (0, 0, *(0.0,) * SCALARS, 0.0)


class Unavailable(Exception):
    """A compiled backend cannot be used here. The message gives the reason and the remedy."""


class CppUpdate(Transfer):
    """An update that the thread pool is executing. It keeps references to the tensors until it is waited for."""

    label = "an update of the C++ library"

    def __init__(self, library: ctypes.CDLL, tensors: object) -> None:
        self._library, self._tensors = library, tensors
        self.handle = ctypes.c_void_p()  # the library writes it, so an exception can't occur between start and store

    @property
    def done(self) -> bool:
        return not self.handle

    def prioritize(self) -> None:
        """Do nothing: all its threads run it already."""

    def cancel(self) -> None:
        """Wait for its end."""
        self.wait()

    def wait(self) -> None:
        if self.handle:
            handle, self.handle = self.handle, ctypes.c_void_p()
            self._library.patrickstar_finish(handle)
        self._tensors = None

    def __del__(self) -> None:
        # If an exception skips `wait`, the tensors must still outlive the update.
        self.wait()


class CppBackend:
    """Updates and gradient statistics by the C++ library.

    `variant` names the instruction set (default: the fastest one here), `threads` limits the number of threads per call
    (default: as many as PyTorch uses).
    """

    def __init__(self, library: ctypes.CDLL, variant: str | None = None, threads: int | None = None) -> None:
        self._library = library
        self._variant = variant
        self._variant_name = None if variant is None else variant.encode()
        self._threads = threads
        self._last_rule: tuple[Rule, tuple[float, ...]] | None = None
        """The last rule, and its numbers as a span has them."""
        self.name = f"C++ ({variant or self.variants()[0]})"

    @classmethod
    def load(cls) -> "CppBackend":
        """Load the library. Raises Unavailable if it was not built or can't be loaded."""
        return cls(_library())

    @classmethod
    def find(cls, variant: str | None = None, threads: int | None = None) -> "CppBackend | None":
        try:
            return cls(_library(), variant, threads)
        except Unavailable:
            return None

    @property
    def codec(self) -> PageCodec:
        """Codec of packed pages, in the instruction set of this backend."""
        assert self._variant in (None, *self.variants()), f"this machine lacks {self._variant}"
        return PageCodec(self._library, self._variant_name)

    def variants(self) -> list[str]:
        """Return the instruction sets that this build contains and this machine supports, fastest first."""
        names: list[str] = []
        while (name := self._library.patrickstar_variant(len(names))) is not None:
            names.append(name.decode())
        return names

    @property
    def pool_size(self) -> int:
        """Number of threads that the pool of the process has started."""
        return int(self._library.patrickstar_pool_size())

    @staticmethod
    def supports(span: Span) -> bool:
        """Return True if the library implements the rule for these dtypes and all tensors are in host memory."""
        return (
            span.rule.code is not None
            and CppBackend.supports_gradient(span.grad)
            and span.master.device.type == "cpu"
            and span.param.device.type == "cpu"
            and span.param.dtype in DTYPES
        )

    @staticmethod
    def supports_gradient(grad: Gradient) -> bool:
        return grad.latest.device.type == "cpu" and grad.latest.dtype in DTYPES and grad.dtype == torch.float32

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> CppUpdate:
        """Start an update. The caller must call `wait` on the result."""
        running = CppUpdate(self._library, list(spans))
        call = self._call([self._packed(span) for span in spans], scales)
        self._check(self._library.patrickstar_start(*call, ctypes.byref(running.handle)))
        return running

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        """Update spans; the calling thread takes part."""
        self._check(self._library.patrickstar_update(*self._call([self._packed(span) for span in spans], scales)))

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        lists = 2 * _NO_LISTS
        packed = [
            _SPAN.pack(0, 0, *_gradient(grad), *lists, 0, 0, grad.numel, 0, DTYPES[grad.latest.dtype], *_NO_RULE)
            for grad in gradients
        ]
        sums, not_finite = (ctypes.c_double * len(gradients))(), ctypes.c_int64()
        call = self._call(packed, scales)
        self._check(self._library.patrickstar_grad_stats(*call, sums, ctypes.byref(not_finite)))
        return GradStats(tuple(sums), not_finite.value)

    def read(self, words: torch.Tensor) -> None:
        """Read a flat tensor of 8-byte words without using them, to measure memory bandwidth in benchmarks."""
        self._library.patrickstar_read(words.data_ptr(), words.numel(), self._execution()[0])

    def _packed(self, span: Span) -> bytes:
        """Return the `Span` of cpp/spans.h for an update."""
        rule, grad = span.rule, span.grad
        last = self._last_rule  # another thread may replace it
        if last is None or last[0] != rule:
            last = self._last_rule = rule, _numbers(rule)
        average = isinstance(rule, AveragedRule)
        return _SPAN.pack(
            span.param.data_ptr(),
            0 if span.upper is None else span.upper.data_ptr(),
            *_gradient(grad),
            *_lists((span.master, *span.states), average),
            *(_NO_LISTS if span.out is None else _lists(span.out, average)),
            0,
            0,
            grad.numel,
            DTYPES[span.param.dtype],
            DTYPES[grad.latest.dtype],
            *last[1],
        )

    def _call(self, packed: Sequence[bytes], scales: Sequence[float]) -> tuple[object, ...]:
        """Return the arguments that the library's calls on spans share."""
        return b"".join(packed), len(packed), *_doubles(scales), *self._execution()

    def _execution(self) -> tuple[int, bytes | None]:
        """Return the number of threads and the variant as arguments of the library."""
        return torch.get_num_threads() if self._threads is None else self._threads, self._variant_name

    def _check(self, status: int) -> None:
        if status == NO_VARIANT:
            raise ValueError(
                f"this machine supports the C++ kernel's variants {self.variants()}, not {self._variant!r}"
            )
        if status == NO_MEMORY:
            raise MemoryError("the C++ kernel could not allocate host memory for its list of pieces")


def _doubles(values: Sequence[float]) -> tuple[ctypes.Array[ctypes.c_double], int]:
    return (ctypes.c_double * len(values))(*values), len(values)


def _numbers(rule: Rule) -> tuple[float, ...]:
    """Return the code, mode, scalars and weight of a rule as a span has them."""
    assert rule.code is not None, f"{type(rule).__name__} is not in the C++ kernel"
    scalars = rule.scalars(torch.float32)
    padding = (0.0,) * (SCALARS - len(scalars))
    return rule.code, rule.mode, *scalars, *padding, rule.weight if isinstance(rule, AveragedRule) else 0.0


def _gradient(grad: Gradient) -> tuple[int, int]:
    """Return the addresses of a gradient's parts."""
    return grad.latest.data_ptr(), 0 if grad.accumulated is None else grad.accumulated.data_ptr()


def _lists(tensors: Sequence[torch.Tensor], average: bool) -> tuple[int, ...]:
    """Return the addresses of a master and its states in the order of `List` in cpp/spans.h.

    Args:
        average: The last one is a moving average.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    last = addresses.pop() if average else 0
    return *addresses, *_NO_LISTS[len(addresses) + 1 :], last


@cache
def _library() -> ctypes.CDLL:
    """Load the shared library from this package or from the folder of an editable install."""
    folders = [Path(folder) for folder in patrickstar._kernels.__path__]
    paths = [folder / LIBRARY for folder in folders if (folder / LIBRARY).exists()]
    if not paths:
        raise Unavailable(
            "it was not built when the package was installed, because building it needs a C++ compiler (Debian, "
            "Ubuntu: apt install g++). Install one, then reinstall the package with `pip install --no-cache-dir -v`"
        )
    try:
        library = ctypes.CDLL(str(paths[0]))
    except OSError as error:
        raise Unavailable(f"{paths[0]} can't be loaded: {error}") from error
    number, text, address, count = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64
    call = [text, count, address, count, number, text]
    for name, result, arguments in (
        ("sources", text, []),
        ("span_bytes", count, []),
        ("variant", text, [number]),
        ("pool_size", number, []),
        ("start", count, [*call, address]),
        ("update", count, call),
        ("finish", None, [address]),
        ("grad_stats", count, [*call, address, address]),
        ("read", ctypes.c_uint64, [address, count, number]),
        *((name, count, [address, count, address, count, text]) for name in ("pack", "unpack")),
    ):
        function = getattr(library, f"patrickstar_{name}")
        function.restype, function.argtypes = result, arguments
    sources = next((folder / "cpp" for folder in folders if (folder / "cpp").is_dir()), None)
    differs = sources is not None and library.patrickstar_sources().decode() != _digest(sources)
    if differs or library.patrickstar_span_bytes() != _SPAN.size:
        raise Unavailable(f"{paths[0]} was built from different sources: reinstall the package")
    return library


def _digest(folder: Path) -> str:
    """Return the digest of the sources, computed as CMakeLists.txt does."""
    sources = sorted(
        path for path in folder.iterdir() if path.suffix in (".cpp", ".h") or path.name == "CMakeLists.txt"
    )
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return hashlib.sha256(digests.encode()).hexdigest()
