"""What a user may choose. The one dial is the budget; the rest is what can't be derived from it."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from patrickstar.errors import ConfigError, DeviceError
from patrickstar.layout.sizes import parse_size


class _Options(BaseModel):
    """Keyword options that are checked, frozen, and spoken of in one line when they are wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    def __init__(self, **options: Any) -> None:
        known = list(type(self).model_fields)
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                raise ConfigError(
                    f"{type(self).__name__} has no option {name!r}; did you mean {close[0]!r}? "
                    f"Its options: {', '.join(known)}"
                )
        try:
            super().__init__(**options)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            )
            raise ConfigError(f"{type(self).__name__}: {problems}") from None


class Adam(_Options):
    """Adam with L2 weight decay, as `torch.optim.Adam`.

    `param_groups` makes torch's list of groups from the model: dictionaries with `params` and what differs in them.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    param_groups: Callable[[torch.nn.Module], Iterable[dict[str, Any]]] | None = None

    @field_validator("lr", "eps", "weight_decay")
    @classmethod
    def _not_negative(cls, value: float) -> float:
        if not value >= 0:
            raise ValueError(f"must not be negative, and {value} is")
        return value

    @field_validator("betas")
    @classmethod
    def _below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"must lie in [0, 1), and {value} do not")
        return value

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is AdamW's."""
        return False


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    weight_decay: float = 1e-2

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is AdamW's."""
        return True


class Config(_Options):
    """How to train within a memory budget.

    device: "cuda", "cpu" or "auto". device_memory, host_memory: budgets, as bytes or as "2GiB"; None is what the
    machine has. chunk_size: "auto", or the size of a `param16` chunk. precision: the dtype operators compute in, with
    fp32 masters; "fp16" scales the loss. activation_offload: keep saved activations on the host between forward and
    backward. Raises ConfigError for options that don't exist or values out of range.
    """

    device: str = "auto"
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    chunk_size: int | str = "auto"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: Adam = AdamW()
    activation_offload: bool = False

    @field_validator("device_memory", "host_memory", "chunk_size")
    @classmethod
    def _size(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        try:
            derived = "auto" if info.field_name == "chunk_size" else None
            return value if value is None or value == derived else parse_size(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

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
                device = torch.device("cuda", torch.cuda.current_device())
            if not count or device.index is None or device.index >= count:
                raise DeviceError(f"device {name!r} is not there: this machine offers {count} CUDA devices; use 'cpu'")
        return device
