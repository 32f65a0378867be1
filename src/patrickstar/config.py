"""What a user may choose. The one dial is the budget; the rest is what can't be derived from it."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationInfo, field_validator

from patrickstar._layout.byte_size import parse_size
from patrickstar._options import Options
from patrickstar.errors import ConfigError, DeviceError
from patrickstar.optim import AdamW, Optimizer, TorchOptimizer


class Disk(Options):
    """A disk below the host: what memory can't hold lies in a scratch file, which ends with the process.

    directory: an existing one that can be written, on a local disk. capacity: the most the file may take, as bytes or
    as "200GiB"; None is what the disk has free. checksums: every page is hashed when it is written, and compared when
    it is read. Raises ConfigError for a capacity that is no size.
    """

    def __init__(self, directory: str | Path, **options: Any) -> None:
        super().__init__(directory=directory, **options)

    directory: str | Path
    capacity: int | str | None = None
    checksums: bool = True

    @field_validator("capacity")
    @classmethod
    def _size(cls, value: int | str | None) -> int | None:
        try:
            return None if value is None else parse_size(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None


class Config(Options):
    """How to train within a memory budget.

    device: "cuda", "cpu" or "auto". device_memory, host_memory: budgets, as bytes or as "2GiB"; None is what the
    machine has. disk: where what these can't hold goes, `ps.Disk(directory)` or a directory. chunk_size: "auto", or the
    size of a `param16` chunk. precision: the dtype operators compute in, with fp32 masters; "fp16" scales the loss.
    optimizer: one of this package's, or an element-wise class of `torch.optim`,
    by itself or as a `functools.partial` with its options. activation_offload: keep saved activations on the host
    between forward and backward. reduce_dtype: what gradients are sent and summed in when several processes average
    them: 16 bits, or "fp32", which sends twice as much. Of several processes on one machine each has `device_memory`,
    and an even part of `host_memory` and of the disk's capacity. Raises ConfigError for options that don't exist or
    values out of range.
    """

    device: str = "auto"
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    disk: Disk | None = None
    chunk_size: int | str = "auto"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: Optimizer = AdamW()
    activation_offload: bool = False
    reduce_dtype: Literal["16-bit", "fp32"] = "16-bit"

    @field_validator("device_memory", "host_memory", "chunk_size")
    @classmethod
    def _size(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        try:
            derived = "auto" if info.field_name == "chunk_size" else None
            return value if value is None or value == derived else parse_size(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("disk", mode="before")
    @classmethod
    def _directory(cls, value: Any) -> Any:
        return Disk(directory=value) if isinstance(value, str | Path) else value

    @field_validator("optimizer", mode="before")
    @classmethod
    def _torch_class(cls, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            name = type(value).__name__
            raise ValueError(
                f"give the class, not an optimizer over parameters: functools.partial(torch.optim.{name}, lr=...), "
                f"or ps.AdamW(lr=...)"
            )
        chosen = TorchOptimizer.wrapping(value) or value
        if not isinstance(chosen, Optimizer):
            raise ValueError(
                f"{value!r} is no optimizer: give one such as ps.AdamW(lr=...), or an element-wise class of torch.optim"
            )
        return chosen

    @property
    def compute_dtype(self) -> torch.dtype:
        """What operators compute in."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.precision]

    def find_device(self) -> torch.device:
        """The compute device. Raises DeviceError if it is not there."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            raise DeviceError(f"{name!r} names no device; use 'auto', 'cpu' or 'cuda'") from None
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(f"device {name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if device.index is None and count:
                # Each process of a machine, as torchrun numbers them, takes a device of its own. Slurm may show each
                # process one GPU alone (--gpus-per-task=1); then all take the first that they see.
                local = os.environ.get("LOCAL_RANK")
                index = int(local) % count if local is not None else torch.cuda.current_device()
                device = torch.device("cuda", index)
            if not count or device.index is None or device.index >= count:
                raise DeviceError(f"device {name!r} is not there: this machine offers {count} CUDA devices; use 'cpu'")
        return device
