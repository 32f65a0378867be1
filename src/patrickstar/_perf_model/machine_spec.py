"""Machine specs: memory sizes and rates of a machine, read from TOML files."""

import json
import tomllib
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from patrickstar._layout.byte_size import parse_size_field
from patrickstar.errors import ConfigError


def _parse_size(value: Any) -> Any:
    return parse_size_field(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]
"""Number of bytes; a string such as "32GB" is parsed."""
Rate = Annotated[float, BeforeValidator(_parse_size), Field(gt=0)]
"""Bytes per second; a string such as "12GB" is parsed."""
Precision = Literal["bf16", "fp16", "fp32"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Part):
    """Identical GPUs. Rates are per GPU and sustained, as large operators reach them, not data-sheet peaks."""

    count: int = Field(gt=0)
    memory: Bytes
    matmul_tflops: float = Field(gt=0)
    """Rate of 16-bit matrix products in 10^12 operations per second; a multiply-add counts as two."""
    fp32_tflops: float | None = Field(default=None, gt=0)
    """Rate of fp32 products without TF32, which PyTorch does not use by default; None if unknown."""
    memory_bandwidth: Rate
    half_rate_size: int = Field(default=0, ge=0)
    """Size of square products that reach half of `matmul_tflops`; 0 if all sizes reach it."""
    bf16: bool = True
    """False if its 16-bit products are in fp16 only, as before NVIDIA's Ampere."""

    def matmul_rate(self, size: int) -> float:
        """Return the operations per second of a product whose smallest side is `size`."""
        return self.matmul_tflops * 1e12 * size / (size + self.half_rate_size)


class Host(_Part):
    """CPUs and host memory."""

    memory: Bytes
    memory_bandwidth: Rate
    """Bandwidth of all cores together, reads plus writes."""
    update_rate: Rate | None = None
    """Measured traffic of an optimizer update on all cores, reads plus writes; None derives it from the bandwidths."""
    cores: int = Field(gt=0)
    sockets: int = Field(default=1, gt=0)
    """A process allocates its memory on one socket and gets that socket's part of the bandwidth."""
    core_bandwidth: Rate | None = None
    """Bandwidth of one core in an update, reads plus writes; None if a few cores saturate the memory."""
    page_lock: Rate | None = None
    """Rate at which a process allocates and page-locks new memory; None if it is unknown, or the links are slower."""
    matmul_tflops: float | None = Field(default=None, gt=0)
    """Rate of all cores in bfloat16; required if the host is the compute tier."""
    fp32_tflops: float | None = Field(default=None, gt=0)
    """Rate of all cores in fp32; None if unknown."""

    def update_bandwidth(self, processes: int, threads: int) -> float:
        """Return the total update traffic in bytes per second of `processes` with `threads` each."""
        memory = (self.update_rate or self.memory_bandwidth) * (min(processes, self.sockets) / self.sockets)
        if self.core_bandwidth is None:
            return memory
        return min(memory, processes * threads * self.core_bandwidth)

    def shared_bandwidth(self, processes: int) -> float:
        """Return the bytes per second that updates, copies and the disk of `processes` read and write together."""
        return max(self.memory_bandwidth, self.update_rate or 0) * (min(processes, self.sockets) / self.sockets)


class Links(_Part):
    """Links between GPUs and host. Rates are per GPU and direction, with both directions busy."""

    h2d: Rate
    d2h: Rate
    shared_by: int = Field(default=1, gt=0)
    """Number of GPUs that share one link, whose rate is that of the faster direction."""
    gpu_gpu: Rate | None = None
    """Bytes per second that one GPU sends in a collective among all; required for more than one GPU."""

    def h2d_per_gpu(self, gpus: int) -> float:
        """Return the H2D bytes per second of each of `gpus` GPUs while all are busy."""
        return min(self.h2d, self._share(gpus))

    def d2h_per_gpu(self, gpus: int) -> float:
        """Return the D2H bytes per second of each of `gpus` GPUs while all are busy."""
        return min(self.d2h, self._share(gpus))

    def _share(self, gpus: int) -> float:
        return max(self.h2d, self.d2h) / min(gpus, self.shared_by)


class DiskDrive(_Part):
    """Disk below the host memory. Rates are sustained, with both directions busy."""

    capacity: Bytes
    read: Rate
    write: Rate


class Network(_Part):
    """Network between equal machines, the nodes of a cluster."""

    bandwidth: Rate
    """Bytes per second and direction of all adapters of a node together, as collectives reach them."""
    latency_s: float = Field(ge=0)
    """Seconds from sending to receiving a small message."""


class Machine(_Part):
    """Machine spec. Without a GPU, the host computes."""

    name: str
    source: str
    """Origin of the figures."""
    gpu: Gpu | None = None
    host: Host
    links: Links | None = None
    disk: DiskDrive | None = None
    network: Network | None = None
    computes_in: Precision | None = None
    """Precision of its products; None: 16 bits."""
    budgets: bool = False
    """True if its sizes of memory are what budgets take by default, of which nothing stays for others."""
    measured: bool = False
    """True if it is this machine, on which operators can be timed."""

    @property
    def device_memory(self) -> int:
        """Bytes of one compute tier: a GPU or the host."""
        return self.gpu.memory if self.gpu is not None else self.host.memory

    @property
    def precision(self) -> Precision:
        """Precision of its products, which the rates describe."""
        return self.computes_in or ("bf16" if self.gpu is None or self.gpu.bf16 else "fp16")

    def in_precision(self, precision: Precision) -> "Machine":
        """Return the machine computing in a precision.

        Raises:
            ConfigError: It has no such products, or their rate is unknown.
        """
        part: Gpu | Host = self.gpu or self.host
        if precision != "fp32":
            if precision == ("fp16" if self.gpu is None else "bf16" if not self.gpu.bf16 else None):
                raise ConfigError(f"precision {precision}: {self.name} computes in {self.precision} or fp32")
            return self.model_copy(update={"computes_in": precision})
        if part.fp32_tflops is None:
            raise ConfigError(
                f"precision fp32: the rate of {self.name} in fp32 is unknown; add fp32_tflops to a machine file"
            )
        part = part.model_copy(update={"matmul_tflops": part.fp32_tflops})
        return self.model_copy(update={"computes_in": precision, "host" if self.gpu is None else "gpu": part})

    def matmul_rate(self, size: int | None = None) -> float:
        """Return the operations per second of products whose smallest side is `size`; None means large."""
        if self.gpu is None:
            assert self.host.matmul_tflops is not None
            return self.host.matmul_tflops * 1e12
        return self.gpu.matmul_rate(size) if size is not None else self.gpu.matmul_tflops * 1e12

    def transfer_rates(self, processes: int) -> tuple[float, float]:
        """Return the H2D and D2H bytes per second of each process while all are busy.

        Without links the cores of the host copy: each byte is read and written.
        """
        if self.links is None:
            return self.host.memory_bandwidth / 2, self.host.memory_bandwidth / 2
        return self.links.h2d_per_gpu(processes), self.links.d2h_per_gpu(processes)

    def share(self, processes: int) -> "Machine":
        """Return the machine as one of `processes` sees it while all are busy: with a part of each shared rate.

        The sizes of memory and disk are those of the machine.
        """
        if processes == 1:
            return self
        host, links, disk = self.host, self.links, self.disk
        own_host: dict[str, Any] = {
            "memory_bandwidth": host.memory_bandwidth / processes,
            "update_rate": host.update_bandwidth(processes, max(1, host.cores // processes)) / processes,
            "sockets": 1,
            "core_bandwidth": None,
        }
        if host.matmul_tflops is not None:
            own_host["matmul_tflops"] = host.matmul_tflops / processes
        parts: dict[str, Any] = {"host": host.model_copy(update=own_host)}
        if links is not None:
            h2d, d2h = self.transfer_rates(processes)
            if self.gpu is None:  # the cores of the host copy
                h2d, d2h = links.h2d / processes, links.d2h / processes
            parts["links"] = links.model_copy(update={"h2d": h2d, "d2h": d2h, "shared_by": 1})
        if disk is not None:
            parts["disk"] = disk.model_copy(update={"read": disk.read / processes, "write": disk.write / processes})
        return self.model_copy(update=parts)


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine spec to a TOML file.

    Raises:
        ConfigError: The file can't be written.
    """
    # A file may be read on another machine.
    values = machine.model_dump(exclude_none=True, exclude={"measured"})
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, part in values.items():
        if isinstance(part, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in part.items())]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the machine file {path} cannot be written: {error.strerror}") from error


def _toml(value: Any) -> str:
    """Return a value as TOML has it, as JSON does, too; of measured rates their first digits."""
    return json.dumps(float(f"{value:.4g}") if isinstance(value, float) else value)


def read_machine(path: Path) -> Machine:
    """Read a machine spec from a TOML file.

    Raises:
        ConfigError: The file is unreadable or invalid; the message names the field.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the machine file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the machine file {path} is not valid TOML: {error}") from error
    try:
        machine = Machine.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the machine file {path}: {field}: {first['msg']}") from None
    _check(machine, path)
    return machine


def _check(machine: Machine, path: Path) -> None:
    if machine.gpu is None and machine.host.matmul_tflops is None:
        raise ConfigError(f"the machine file {path}: host.matmul_tflops: required without a [gpu] section")
    if machine.gpu is not None and machine.links is None:
        raise ConfigError(f"the machine file {path}: links: required with a [gpu] section")
    if machine.gpu and machine.gpu.count > 1 and machine.links and machine.links.gpu_gpu is None:
        raise ConfigError(f"the machine file {path}: links.gpu_gpu: required for more than one GPU")


def known_machines() -> dict[str, Path]:
    """Return the files of the machine specs in this package by name."""
    folder = Path(str(resources.files("patrickstar") / "_perf_model" / "machines"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_machine(name_or_path: str) -> Machine:
    """Return the machine spec with a name from this package, or read it from a TOML file.

    Raises:
        ConfigError: There is no such name or file; the message lists the nearest names.
    """
    known = known_machines()
    if name_or_path in known:
        return read_machine(known[name_or_path])
    if Path(name_or_path).is_file():
        return read_machine(Path(name_or_path))
    nearest = get_close_matches(name_or_path, known, n=3, cutoff=0.3) or list(known)
    raise ConfigError(f"{name_or_path!r} is neither a known machine nor a file; did you mean {', '.join(nearest)}?")
