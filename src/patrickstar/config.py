"""User configuration: memory budgets, device, precision, optimizer and disk."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from patrickstar._hardware.compute_device import find_device
from patrickstar._layout.byte_size import parse_size_field
from patrickstar._layout.schema import COMPUTE_DTYPES
from patrickstar._options import Options
from patrickstar.errors import ConfigError
from patrickstar.optim import SGD, Adam, AdamW, AdamW8bit, Lion, Muon, Optimizer, ScheduleFreeAdamW, TorchOptimizer


class Disk(Options):
    """Disk tier: a swap file for the chunks that memory can't hold.

    It is deleted when the process ends, unless checkpoints refer to it.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
    """

    def __init__(self, directory: str | Path, **options: Any) -> None:
        super().__init__(directory=directory, **options)

    directory: str | Path
    """Existing, writable directory on a local disk."""
    capacity: int | str | None = None
    """Maximum size of the swap file, in bytes or as "200GiB"; shared by the processes of a machine. Default None: the
    free space of the disk."""
    checksums: bool = True
    """Hash each page when it is written, and compare the hash when it is read. Default True."""
    durable: bool = False
    """Let checkpoints on the same file system refer to pages of the swap file instead of writing them again, so that
    each step can have one. The file then has room for two versions of each page. Default False."""
    packed: bool = False
    """Store pages of fp32 masters and states without loss in 7/8 of their bytes; faster where a step waits for the
    drive and cores are idle. `patrickstar doctor --disk` measures both. Default False."""

    @field_validator("capacity")
    @classmethod
    def _size(cls, value: int | str | None) -> int | None:
        return None if value is None else parse_size_field(value)

    @model_validator(mode="after")
    def _check_durable(self) -> "Disk":
        if self.durable and not self.checksums:
            raise ValueError("durable=True needs checksums=True: a checkpoint has the checksum of each page")
        return self


class InBackward(Options):
    """Update in backward: a chunk is updated as soon as its gradients are complete, and its gradients are freed.

    It is a promise that nothing happens between a backward and its step: no clipping, no second backward, no use of
    gradients, no change of options. So gradients never exist all at once, and with `Adam`, `AdamW` or an `EMA` of these
    in bf16 the model data takes 12 bytes per parameter in place of 14. Results are those of plain PyTorch. It takes one
    process, and not fp16.

    Raises:
        ConfigError: An option is unknown.
    """


class Delayed(Options):
    """Delayed update (ZeRO-Offload §5.2): an update runs beside the next forward and backward, which do not wait.

    These read the parameters before that update; docs/staleness.md has the recurrence. It takes 2 more bytes per
    parameter with a 16-bit precision, 4 with fp32.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
    """

    after: NonNegativeInt = 40
    """Number of the first optimizer step whose update is delayed, counted from 1. Default 40: at the beginning of
    training gradients change too fast."""


class LockFree(Options):
    """Lock-free update (Angel-PTM §4.3): states on disk are updated page by page whenever they have been read.

    Gradients are summed on the host until the update of their page; forward and backward never wait for it, unless a
    gradient would be older than `max_staleness` steps. docs/staleness.md has the recurrence. It takes 6 more bytes of
    host memory per parameter with a 16-bit precision, 8 with fp32; with AdamW in bf16 2 fewer of masters.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
    """

    max_staleness: PositiveInt = 4
    """Number of steps whose gradients the parameters of a forward may lack, at most. Default 4."""
    after: NonNegativeInt = 40
    """Number of the first optimizer step whose update is lock-free, counted from 1. Default 40, as for `Delayed`."""
    gradient_dtype: Literal["fp32", "16-bit"] = "fp32"
    """Dtype of the sums of gradients. Default "fp32"; "16-bit", as in the paper, is the compute dtype."""
    log: str | Path | None = None
    """File to which each update is written: its page and the steps whose gradients it used. Default None: no log."""
    replay: str | Path | None = None
    """Log of another run, whose updates are repeated in the same order. Default None: no replay."""

    @model_validator(mode="after")
    def _two_files(self) -> "LockFree":
        if self.log is not None and self.replay is not None and Path(self.log).resolve() == Path(self.replay).resolve():
            raise ValueError(f"log and replay are the same file, {str(self.log)!r}: a log is read whole before a run")
        return self


class Config(Options):
    """Training configuration: memory budgets, device, precision and optimizer.

    Raises:
        ConfigError: An option is unknown, or its value is invalid.
    """

    device: str = "auto"
    """Compute device: "cuda", or "cuda:1" and so on, "xpu", "cpu", or "auto" (default: the machine's accelerator, if
    any)."""
    device_memory: int | str | None = None
    """Device budget of each process, in bytes or as "2GiB". Default None: most of the GPU's free memory; on a CPU the
    RAM that `host_memory` leaves, or half of it, less the reserve below."""
    host_memory: int | str | None = None
    """Host budget, in bytes or as "12GiB"; divided evenly among the processes of a machine. Default None: the available
    RAM, on a CPU the part that `device_memory` leaves, or half of it; in any case less a reserve for libraries, page
    cache and other programs: a tenth of all RAM, or half of what is available, if that is less."""
    disk: Disk | None = None
    """Disk tier for chunks that memory can't hold: a `Disk`, or its directory. Default None: no disk."""
    chunk_size: int | str = "auto"
    """Size of a chunk of 16-bit parameters, in bytes or as "64MiB". Default "auto": the size with the least padding."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute dtype; master parameters are fp32. Default "auto": on a GPU bf16, or fp16 if it has no bf16; on a CPU
    bf16 or fp32, whichever is measured to be faster. "fp16" uses dynamic loss scaling. A model that mixes dtypes keeps
    them."""
    keep_fp32: tuple[str, ...] = ()
    """Parameters that operators read in fp32 beside a 16-bit `precision`: parts of dotted names such as "lm_head" or
    "router.*.weight". Default (): only those that a model of transformers names itself, such as its routers'."""
    optimizer: Optimizer = AdamW()
    """Optimizer: one of this package, or a class of `torch.optim`, alone or as a `functools.partial` with its options.
    Default `AdamW()`."""
    update: InBackward | Delayed | LockFree | None = None
    """When updates are made. Default None: in or after the step, before the next forward reads a parameter.
    `InBackward()`: during backward, with the same results, in 12 bytes per parameter. `Delayed()`: one step later, so
    that nothing waits for them. `LockFree()`: as soon as the disk has delivered their states."""
    activation_checkpointing: Annotated[float, Field(ge=0, le=1)] | Literal["products", "auto"] | None = None
    """Share of the layers of a model of transformers, the first ones, that store their input alone and are computed
    again in backward: 0.5, or True for all. The others store what their matrix products and their attention return, and
    compute the rest again; with "products" all do. 0 or False: all activations are stored. "auto": the fastest of these
    and of shares of `activation_offload`, by dry runs with the inputs of the first forward. Default None: as the model
    is set."""
    activation_offload: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the saved activations, in bytes, that are on the host between forward and backward: 0.5, or True for
    all. Default 0."""
    tiled_loss: bool = False
    """Compute the loss of a language model of transformers by `ps.functional.linear_cross_entropy`, without storing
    logits. Reading `outputs.logits` computes them. Default False."""
    tiled_mlp: bool = False
    """Compute the MLPs and norms in the layers of a model of transformers by tiles of tokens, in backward again, so
    that their widest tensors are those of a tile. It matters from some thousand tokens on. Default False."""
    reduce_dtype: Literal["16-bit", "fp32"] = "16-bit"
    """Dtype in which several processes send and sum gradients: "16-bit" (default) is the compute dtype; "fp32" sends
    twice the bytes. Replicas of a mesh send partial sums to each other in fp32 in both cases."""

    if TYPE_CHECKING:  # what the fields accept, beyond what they hold

        def __init__(
            self,
            *,
            device: str = ...,
            device_memory: int | str | None = ...,
            host_memory: int | str | None = ...,
            disk: Disk | str | Path | Mapping[str, Any] | None = ...,
            chunk_size: int | str = ...,
            precision: Literal["auto", "bf16", "fp16", "fp32"] = ...,
            keep_fp32: Sequence[str] = ...,
            optimizer: Optimizer | Mapping[str, Any] | Callable[..., torch.optim.Optimizer] = ...,
            update: InBackward | Delayed | LockFree | Mapping[str, Any] | None = ...,
            activation_checkpointing: float | Literal["products", "auto"] | None = ...,
            activation_offload: float = ...,
            tiled_loss: bool = ...,
            tiled_mlp: bool = ...,
            reduce_dtype: Literal["16-bit", "fp32"] = ...,
        ) -> None: ...

    @classmethod
    def of(cls, options: "Config | Mapping[str, Any] | str | Path | None") -> "Config":
        """Return a configuration from options in another form.

        Args:
            options: A `Config`, a mapping of options, the path of a TOML file with them, or None for the defaults.
                `disk` may be a table with the options of `Disk`, `optimizer` one with `name` (a class of this package)
                and the options of the class, `update` one with `name = "InBackward"`, `"Delayed"` or `"LockFree"`
                and its options.

        Raises:
            ConfigError: The file can't be read, or an option is invalid.
        """
        if isinstance(options, cls):
            return options
        if isinstance(options, str | Path):
            try:
                options = tomllib.loads(Path(options).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise ConfigError(f"the configuration {str(options)!r} can't be read as TOML: {error}") from error
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"a configuration is a ps.Config, a mapping of options or a TOML file, not {options!r}")
        return cls(**options or {})

    @field_validator("device_memory", "host_memory", "chunk_size")
    @classmethod
    def _size(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        derived = "auto" if info.field_name == "chunk_size" else None
        return value if value is None or value == derived else parse_size_field(value)

    @field_validator("disk", mode="before")
    @classmethod
    def _directory(cls, value: Any) -> Any:
        return Disk(directory=value) if isinstance(value, str | Path) else value

    @field_validator("update", mode="before")
    @classmethod
    def _update(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = {kind.__name__: kind for kind in (InBackward, Delayed, LockFree)}
        if value.get("name") not in known:
            raise ValueError(f"an update given as a mapping needs a name: one of {', '.join(known)}")
        return known[value["name"]](**{name: option for name, option in value.items() if name != "name"})

    @field_validator("optimizer", mode="before")
    @classmethod
    def _torch_class(cls, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            name = type(value).__name__
            raise ValueError(
                f"give the class, not an optimizer over parameters: functools.partial(torch.optim.{name}, lr=...), "
                f"or ps.AdamW(lr=...)"
            )
        if isinstance(value, Mapping):
            options = {name: option for name, option in value.items() if name != "name"}
            known = {kind.__name__: kind for kind in (Adam, AdamW, AdamW8bit, SGD, Lion, Muon, ScheduleFreeAdamW)}
            if value.get("name") not in known:
                raise ValueError(f"an optimizer given as a mapping needs a name: one of {', '.join(known)}")
            return known[value["name"]](**options)
        chosen = TorchOptimizer.wrapping(value) or value
        if not isinstance(chosen, Optimizer):
            raise ValueError(
                f"{value!r} is not an optimizer: use ps.AdamW(lr=...) or another of this package, or a class of "
                f"torch.optim"
            )
        return chosen

    @model_validator(mode="after")
    def _chosen_together(self) -> "Config":
        if self.activation_checkpointing == "auto" and self.activation_offload:
            raise ValueError(
                "activation_checkpointing='auto' chooses the share of activation_offload, too: leave that "
                "out, or name both shares"
            )
        return self

    @model_validator(mode="after")
    def _sums_without_overflow(self) -> "Config":
        if isinstance(self.update, LockFree) and self.update.gradient_dtype == "16-bit" and self.precision == "fp16":
            raise ValueError(
                "gradient_dtype='16-bit' stores gradients without the loss scale, which fp16 rounds to zero: use 'fp32'"
            )
        return self

    @model_validator(mode="after")
    def _updates_chunks(self) -> "Config":
        if self.update is not None and self.optimizer.updates_together:
            raise ValueError(
                f"{self.optimizer.name} updates all parameters together, and updates with update=... are made chunk by "
                f"chunk: leave update out, or use an optimizer such as ps.AdamW"
            )
        return self

    @model_validator(mode="after")
    def _knows_overflow(self) -> "Config":
        if self.updates_in_backward and self.precision == "fp16":
            raise ValueError(
                "update=InBackward() updates parameters before all gradients are known to be finite, which fp16 needs: "
                "use precision='bf16' or 'fp32', or leave update out"
            )
        return self

    @model_validator(mode="after")
    def _counts_steps(self) -> "Config":
        if isinstance(self.update, LockFree) and isinstance(self.optimizer, ScheduleFreeAdamW):
            raise ValueError(
                "ScheduleFreeAdamW weights the steps of each parameter, and lock-free updates of its pages use the "
                "gradients of different steps: use ps.AdamW, or another update"
            )
        return self

    @property
    def updates_in_backward(self) -> bool:
        """True if every backward updates the chunks whose gradients are complete."""
        return isinstance(self.update, InBackward)

    @property
    def splits_masters(self) -> bool:
        """True if masters of bfloat16 parameters are split: their gradients are not in place of the upper halves."""
        return isinstance(self.update, InBackward | LockFree) and self.optimizer.splits_masters

    @property
    def late_update(self) -> Delayed | LockFree | None:
        """The option of updates that take effect after the next forward has begun; None without them."""
        return None if isinstance(self.update, InBackward) else self.update

    @property
    def compute_dtype(self) -> torch.dtype:
        """Compute dtype of the operators.

        Raises:
            ConfigError: The precision is "auto", which stands for a dtype only once it is chosen for a model and a
                device. `engine.config` has the chosen one.
        """
        if self.precision == "auto":
            raise ConfigError("precision='auto' is chosen when an engine is created: ask engine.config, or set one")
        dtype: torch.dtype = getattr(torch, COMPUTE_DTYPES[self.precision])
        return dtype

    def with_precision(self, precision: str) -> "Config":
        """Return this configuration with the precision that was chosen for "auto".

        `model_fields_set` of the result does not contain the precision: nobody asked for it.

        Raises:
            ConfigError: Another option excludes this precision.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        chosen = type(self)(**given | {"precision": precision})
        chosen.model_fields_set.discard("precision")
        return chosen

    def find_device(self) -> torch.device:
        """Find the compute device of this process.

        Returns:
            The device. Processes of one machine select different accelerators, by `LOCAL_RANK`.

        Raises:
            DeviceError: The device is unknown, unsupported or not available.
        """
        return find_device(self.device)
