"""Allocator in front of PyTorch's CPU allocator: it counts tensors exactly and bounds the freed memory it caches."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
import weakref
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "cpp" / "cpu_allocator.cpp"
COMPILE_S = 300.0

# [Note: counting tensors on a CPU]
# The resident memory of a process says little about tensors: the heap keeps freed memory, libraries load code and keep
# buffers, and none of it is the same in two runs. So tensors are counted where they are allocated, as on a GPU. The
# allocator uses PyTorch's C++ interface, whose layout differs between versions; it is compiled at its first use for the
# installed version (a second or two), and kept in the user's cache folder.
#
# An engine counts the tensors that are allocated after it was made, by a counter of its own. What was there before, as
# the user's data or the model of an earlier engine, takes no part in its count, whenever it is freed: subtracted as a
# number, its release would hide as many bytes of a step.
#
# Freed large blocks are cached, since a fresh page costs more than most operators that write it, but only as far as the
# engines leave room: no engine's live tensors exceed its limit together with the cached bytes. Without engines nothing
# is cached.


class TensorCounter:
    """Counter of the tensors that are allocated from its creation on. See [Note: counting tensors on a CPU]."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._handle = ctypes.c_void_p(library.patrickstar_open_counter())
        self._live_bytes = library.patrickstar_live_bytes
        weakref.finalize(self, library.patrickstar_close_counter, self._handle).atexit = False

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tensors."""
        nbytes: int = self._live_bytes(self._handle)
        return nbytes

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes since `reset_peak`."""
        nbytes: int = self._library.patrickstar_peak_bytes(self._handle)
        return nbytes

    def reset_peak(self) -> None:
        self._library.patrickstar_reset_peak(self._handle)

    def set_limit(self, nbytes: int | None) -> None:
        """Keep live and cached bytes within `nbytes`, as far as freeing the cache can. None: no limit."""
        self._library.patrickstar_set_limit(self._handle, -1 if nbytes is None else max(0, nbytes))


class CpuAllocator:
    """The process's allocator of CPU tensors. See [Note: counting tensors on a CPU]."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("live_bytes", "peak_bytes", "cached_bytes", "refused_bytes"):
            getattr(library, f"patrickstar_{name}").restype = ctypes.c_int64
        for name in ("close_counter", "live_bytes", "peak_bytes", "reset_peak"):
            getattr(library, f"patrickstar_{name}").argtypes = [ctypes.c_void_p]
        library.patrickstar_open_counter.restype = ctypes.c_void_p
        library.patrickstar_set_limit.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.patrickstar_open_file.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._every = self.counter()

    def counter(self) -> TensorCounter:
        """Return a counter of the tensors that are allocated from now on."""
        return TensorCounter(self._library)

    @property
    def live_bytes(self) -> int:
        """Bytes of all tensors that were allocated since the allocator was installed."""
        return self._every.live_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of freed blocks that are kept for reuse."""
        nbytes: int = self._library.patrickstar_cached_bytes()
        return nbytes

    # Large tensors in a file

    def open_file(self, descriptor: int, capacity_bytes: int) -> bool:
        """Map large tensors that are allocated from now on from an empty file, as far as it and its disk have space.

        Returns:
            False if another file is in use.
        """
        return bool(self._library.patrickstar_open_file(descriptor, capacity_bytes))

    @property
    def refused_bytes(self) -> int:
        """Bytes of large tensors that the file had no space for; they are in memory."""
        nbytes: int = self._library.patrickstar_refused_bytes()
        return nbytes

    def stop_file(self) -> None:
        """Allocate new tensors in memory again."""
        self._library.patrickstar_stop_file()

    def drop_file_pages(self) -> None:
        """Drop the file's pages from this process's memory; accesses map them again."""
        self._library.patrickstar_drop_file_pages()

    def close_file(self) -> None:
        """Forget the file before its descriptor is closed; tensors in it stay usable."""
        self._library.patrickstar_close_file()


@cache
def cpu_allocator() -> CpuAllocator | None:
    """Return the process's allocator, installed at the first call; None, after a warning, if that is impossible."""
    library = native_library()
    if library is None:
        return None
    if not library.patrickstar_install():
        warnings.warn(
            "tensors on the CPU can't be counted exactly, because another allocator was set for them; the memory of "
            "the whole process is measured instead",
            stacklevel=2,
        )
        return None
    return CpuAllocator(library)


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the library that uses PyTorch's C++ interface; None, after a warning, if it can't be compiled."""
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(
            f"tensors on the CPU can't be counted exactly, and the memory of the whole process is measured instead, "
            f"which is slower and includes freed memory: {str(reason).strip()[-500:]}. Nor can parameters that are "
            f"not on the device refuse to be read by native code. Install a C++ compiler (g++) or set CXX",
            stacklevel=2,
        )
        return None


def _compiled() -> Path:
    """Return the library for this PyTorch, compiled unless the cache folder has it."""
    source = SOURCE.read_bytes()
    root = Path(torch.__file__).parent
    key = hashlib.sha256(b"|".join([source, torch.__version__.encode(), str(root).encode()])).hexdigest()[:16]
    library = cache_folder() / f"cpu_allocator-{key}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "g++"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        flags = [
            "-O2",
            "-std=c++20",
            "-fPIC",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
        command = [compiler, *flags, str(SOURCE), *paths, "-lc10", "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
        made.replace(library)  # at once, since several processes may compile it
    return library


def cache_folder() -> Path:
    """Return the user's cache folder of this package, below XDG_CACHE_HOME or ``~/.cache``."""
    # The XDG specification requires that a relative path is ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "patrickstar"
