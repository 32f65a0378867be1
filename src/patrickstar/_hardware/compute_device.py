"""Selection of the compute device of a process."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from patrickstar.errors import DeviceError

UNSUPPORTED = {
    "meta": "its tensors have no content",
    "mps": "PyTorch can't resize a storage there, so a chunk's memory could not be freed while parameters view it",
}
"""Types of devices that are refused, with the reason."""


def find_device(name: str = "auto") -> torch.device:
    """Find the compute device of this process.

    Args:
        name: A device of PyTorch, or "auto": the accelerator, if there is a supported one, else the CPU.

    Returns:
        The device. Processes of one machine select different accelerators, by `LOCAL_RANK`.

    Raises:
        DeviceError: The device is unknown, unsupported or not available.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = "cpu" if found is None or found.type in UNSUPPORTED else found.type
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"unknown device {name!r}; use 'auto', 'cpu', 'cuda' or 'xpu'") from None
    if device.type in UNSUPPORTED:
        raise DeviceError(f"device {name!r} is not supported, since {UNSUPPORTED[device.type]}; use 'cpu'")
    if device.type != "cpu":
        count = torch.accelerator.device_count() if found is not None and found.type == device.type else 0
        if device.index is None and count:
            # torchrun numbers the processes of a machine: each selects its own GPU. Slurm may show each process only
            # one GPU (--gpus-per-task=1); then each selects the first GPU that it sees.
            local_rank = os.environ.get("LOCAL_RANK")
            current = torch.accelerator.current_device_index()
            index = int(local_rank) % count if local_rank is not None else current
            device = torch.device(device.type, index)
        if not count or device.index is None or device.index >= count:
            raise DeviceError(
                f"device {name!r} is not available: PyTorch finds {count} {device.type} devices here; use 'cpu'"
            )
    return device


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes products in; None without autocast, which not every device has."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context with autocast to a dtype, or without autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
