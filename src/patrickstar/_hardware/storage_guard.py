"""Storages that refuse to be read, by an error that says why."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from patrickstar._hardware.cpu_allocator import native_library

# [Note: storages that refuse to be read]
# `__torch_function__` sees the operators of Python only. TorchScript functions, C++ extensions and kernels that a
# transform of torch.func starts take the tensor itself. PyTorch's storages have a flag for such cases, which CUDA
# graphs use for memory that was given back: while it is set, every kernel that asks for the data pointer raises an
# error with a message of our own, on every device and at no cost to operators on other storages. The storage of a
# chunk has this flag while the chunk has no device memory, since views of parameters share it; so have the storages
# that evicted parameters use meanwhile.


class StorageGuard(NamedTuple):
    """Sets and clears the flag of a storage."""

    refuse: Callable[[int, str], None]
    """Let every access to the memory of a storage, given by its address, raise a RuntimeError with this message."""
    allow: Callable[[int], None]


@cache
def storage_guard() -> StorageGuard | None:
    """Return PyTorch's own functions, or those of the compiled library in builds without them; None without either.

    Versions of PyTorch that can't clear the flag have neither.
    """
    refuse = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    allow = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
    if refuse is not None and allow is not None:
        return StorageGuard(refuse, allow)
    library = native_library()
    if library is None or not library.patrickstar_can_refuse():
        return None
    library.patrickstar_refuse_access.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.patrickstar_allow_access.argtypes = [ctypes.c_void_p]
    return StorageGuard(
        lambda storage, message: library.patrickstar_refuse_access(storage, message.encode()),
        library.patrickstar_allow_access,
    )


def refuse_access(storage: torch.UntypedStorage, message: str) -> bool:
    """Let every access to a storage raise a RuntimeError with this message; return whether that is possible here."""
    guard = storage_guard()
    if guard is not None:
        guard.refuse(storage._cdata, message)
    return guard is not None


def allow_access(storage: torch.UntypedStorage) -> None:
    """Let a storage be read and written again."""
    if (guard := storage_guard()) is not None:
        guard.allow(storage._cdata)
