"""Strict device: a simulated accelerator for tests, on which a missing wait, order or guard of a lifetime fails.

[Note: strict device]
PyTorch takes it for an accelerator of its own type (`PrivateUse1`, named "strict"): tensors, streams, events, autograd
threads and the caching allocator's statistics are those of a real one. It differs from a real one in four ways:

- Memory of the device is inaccessible to the host. Any access ends the process with a trace of the guilty line.
- Work is lazy. An operator or copy is queued on the current stream, and runs when a thread waits for it; before that
  only if the schedule draws it. A schedule follows from a seed: it decides for each stream whether its work tends to
  run early or late. So code that reads, overwrites or frees memory without an order between streams fails under some
  seed, and under the same seed again.
- Freed memory is filled with NaN by its stream, and is then reused at once. Targets of queued copies to the host hold
  NaN until the copy has run.
- Every wait of a thread for unfinished work is counted by what it called (`host_waits`).

Queued work names memory by address, so that it keeps none alive. Operators run the CPU's kernels: results equal those
of plain PyTorch on this device, not those of the CPU in every bit. It simulates no kernel choice by alignment and no
driver, and speed only if it is asked to: see [Note: timed mode] in `timed.py`.

There is one PrivateUse1 device per process, and autograd's threads are made at the first backward. So tests that use it
run in processes of their own: `PATRICKSTAR_TEST_DEVICE=strict pytest tests/strict tests/cuda`.
"""

import fcntl
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from patrickstar._hardware import workspaces
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.reserved_limits import ReservedLimits
from patrickstar._hardware.workspaces import library_bytes
from patrickstar._schedule.fragmentation import Fragmentation
from patrickstar._tiers.hardware import Hardware

from . import process_group
from .timed import OperatorTimes as OperatorTimes
from .timed import Rates as Rates

_settings = {"small_bytes": 0, "workspace_bytes": 0}
SOURCES = Path(__file__).parent / "cpp"
CAPACITY = 1 << 30


def build() -> Path:
    """Compile the extension for this version of PyTorch, unless it was compiled before; return its path.

    One process compiles, and others that need it wait.
    """
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode())
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "patrickstar" / "strict_device"
    library = base / f"strict_{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    base.mkdir(parents=True, exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(sources, library)
    return library


def _compile(sources: list[Path], library: Path) -> None:
    root = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-Wall",
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_path('include')}",
        "-DTORCH_EXTENSION_NAME=_strict_device",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = []
        for source in (path for path in sources if path.suffix == ".cpp"):
            objects.append(Path(scratch) / f"{source.stem}.o")
            command = [compiler, *flags, "-c", str(source), "-o", str(objects[-1])]
            subprocess.run(command, check=True, capture_output=True, text=True)
        linked = Path(scratch) / library.name
        libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        command = [compiler, "-shared", *map(str, objects), "-o", str(linked), *libraries]
        subprocess.run(command, check=True, capture_output=True, text=True)
        linked.replace(library)


def _load() -> Any:
    loader = ExtensionFileLoader("_strict_device", str(build()))
    spec = spec_from_loader("_strict_device", loader)
    assert spec is not None
    extension = module_from_spec(spec)
    loader.exec_module(extension)
    return extension


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


# Kernels run in the thread that happens to wait for them. Their bits must not depend on its number of threads.
torch.set_num_threads(1)
extension = _load()
torch.utils.rename_privateuse1_backend("strict")

_device_module = ModuleType("torch.strict")
"""What PyTorch expects of `torch.<device type>`."""
_device_module.__dict__.update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _lazy_init=lambda: None,  # devices are made at their first use
    _is_in_bad_fork=lambda: False,
    device_count=lambda: int(extension.DEVICES),
    current_device=torch.accelerator.current_device_index,
    set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
    get_device_name=lambda device=None: "strict device",
    synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    manual_seed=lambda seed: extension.seed(torch.accelerator.current_device_index(), seed),
    manual_seed_all=lambda seed: [extension.seed(index, seed) for index in range(extension.DEVICES)],
    get_rng_state=lambda device=None: extension.get_state(_index(device)),
    set_rng_state=lambda state, device=None: extension.set_state(_index(device), state),
)
torch._register_device_module("strict", _device_module)


def configure(
    *,
    seed: int = 0,
    capacity: int = CAPACITY,
    segment_bytes: int = 0,
    small_bytes: int = 0,
    workspace_bytes: int = 0,
    timed: Rates | None = None,
) -> None:
    """Run all queued work; then set the schedule's seed, each device's capacity, and how memory fragments.

    Args:
        seed: Seed of the schedule by which queued work runs.
        capacity: Bytes of each device's memory.
        segment_bytes: Least size of a segment. Blocks are cut from segments, and a segment is given back as a whole.
            0: each block is a segment, and memory does not fragment.
        small_bytes: Largest block of the small pool. Each stream then has an expandable segment of small blocks, with
            pages of twice these bytes, and one of the others, with pages of 20 times: PyTorch's allocator of CUDA
            devices with expandable segments and `small_bytes` of 1 MiB. 0: segments are as `segment_bytes` says.
        workspace_bytes: Bytes that products of matrices keep for each thread and stream; 0: none.
        timed: Rates of copies in timed mode, in which work takes time and runs beside the host; None: it runs by the
            schedule.
    """
    rates = (0.0, 0.0) if timed is None else (timed.up, timed.down)
    _settings.update(small_bytes=small_bytes, workspace_bytes=workspace_bytes)
    workspaces._known.clear()
    extension.configure(capacity, segment_bytes, small_bytes, workspace_bytes, seed, *rates)


@contextmanager
def uncounted() -> Iterator[None]:
    """Return a context in which the calling thread's waits are not counted."""
    extension.set_worker_thread(True)
    try:
        yield
    finally:
        extension.set_worker_thread(False)


@contextmanager
def in_collective() -> Iterator[None]:
    """Return a context in which neither waits nor copied bytes of the calling thread are counted."""
    extension.set_in_collective(True)
    try:
        with uncounted():
            yield
    finally:
        extension.set_in_collective(False)


def copied_bytes() -> int:
    """Return the bytes copied between host and device so far: all but values of at most 256 bytes, and collectives."""
    return int(extension.copied_bytes())


def host_waits() -> int:
    """Return how often threads, but for worker threads, have waited for copies, events and streams of the device."""
    waits = extension.host_waits()
    return sum(waits[kind] for kind in ("event", "stream", "copy"))


class StrictAccelerator(TorchDevice):
    """Accelerator of a strict device, with registered host memory.

    Its memory is limited, and its workspaces are counted, as those of a CUDA device.
    """

    @property
    def fragmentation(self) -> Fragmentation:
        return Fragmentation(_settings["small_bytes"])

    def limit_reserved(self, owner: object, nbytes: int) -> None:
        _limits[self.index].add(owner, nbytes - self.fragmentation.overshoot_bytes)
        if self.allocator_stats().reserved_bytes > nbytes:
            self.release_cached_memory()

    def unlimit_reserved(self, owner: object) -> None:
        _limits[self.index].remove(owner)

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        if not _settings["workspace_bytes"]:
            return 0
        with uncounted():
            return library_bytes(self, dtype, in_updates, lambda: _settings["workspace_bytes"])

    def enter_worker(self) -> None:
        super().enter_worker()
        extension.set_worker_thread(True)

    def page_lock(self, address: int, nbytes: int) -> list[int]:
        extension.register_host(address, nbytes)
        return [address]

    def page_unlock(self, locked: list[int]) -> None:
        self.synchronize()
        for address in locked:
            extension.unregister_host(address)


def _new_accelerator(device: torch.device) -> TorchDevice | None:
    return StrictAccelerator(device) if device.type == "strict" else None


def limited_bytes(index: int = 0) -> int:
    """Return the limit of what a device's allocator reserves."""
    return _set_limits.get(index, UNLIMITED)


def limit(nbytes: int, index: int = 0) -> None:
    """Limit what a device's allocator reserves, as a user may."""
    _set_limits[index] = nbytes
    extension.set_limit(index, nbytes)


def _new_limits(index: int) -> ReservedLimits:
    return ReservedLimits(lambda: limited_bytes(index), lambda nbytes: limit(nbytes, index))


UNLIMITED = (1 << 63) - 1
_set_limits: dict[int, int] = {}
_limits = [_new_limits(index) for index in range(extension.DEVICES)]

process_group.register(in_collective)
Hardware.new_accelerator = staticmethod(_new_accelerator)  # type: ignore[method-assign]
