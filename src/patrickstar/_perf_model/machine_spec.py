"""What a machine has and how fast its parts are: the description that estimates are made for. Files are TOML."""

import tomllib
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from patrickstar._layout.byte_size import parse_size
from patrickstar.errors import ConfigError


def _parse_size(value: Any) -> Any:
    try:
        return parse_size(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ValueError(str(error)) from None


Bytes = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]
"""A number of bytes, also as "32GB"."""
Rate = Annotated[float, BeforeValidator(_parse_size), Field(gt=0)]
"""Bytes per second, also as "12GB"."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Part):
    """The GPUs, all alike. Rates are of one, and sustained: what large operators reach, not what a data sheet says."""

    count: int = Field(gt=0)
    memory: Bytes
    matmul_tflops: float = Field(gt=0)
    """Of matrix products in 16 bits, 10^12 operations per second; a multiplication and an addition are two."""
    memory_bandwidth: Rate
    half_rate_size: int = Field(default=0, ge=0)
    """The size of square products that reach half of `matmul_tflops`; 0 where all sizes reach it."""

    def matmul_rate(self, size: int) -> float:
        """Operations per second of a product whose smallest side is `size`: the larger, the nearer to the limit."""
        return self.matmul_tflops * 1e12 * size / (size + self.half_rate_size)


class Host(_Part):
    """The processors and their memory."""

    memory: Bytes
    memory_bandwidth: Rate
    """What all cores reach together, reads and writes counted."""
    update_rate: Rate | None = None
    """What an update was measured to read and write per second, by all cores; None for what memory and cores say."""
    cores: int = Field(gt=0)
    sockets: int = Field(default=1, gt=0)
    """A process has its memory on one, with that one's part of the bandwidth."""
    core_bandwidth: Rate | None = None
    """What one core moves in an update, reads and writes counted; None where a few cores reach all of it."""
    page_lock: Rate | None = None
    """What a process fills of memory that it allocates and page-locks anew; None where links are slower."""
    matmul_tflops: float | None = Field(default=None, gt=0)
    """Of all cores, in bfloat16; needed where the compute tier is the host's."""

    def update_bandwidth(self, processes: int, threads: int) -> float:
        """Bytes per second that the updates of so many processes move together, with so many threads each."""
        memory = (self.update_rate or self.memory_bandwidth) * (min(processes, self.sockets) / self.sockets)
        if self.core_bandwidth is None:
            return memory
        return min(memory, processes * threads * self.core_bandwidth)


class Links(_Part):
    """Between GPUs and host. All rates are of one GPU and one direction, while the other direction is busy too."""

    h2d: Rate
    d2h: Rate
    shared_by: int = Field(default=1, gt=0)
    """How many GPUs have one such link together, which is as fast as the faster direction of one."""
    gpu_gpu: Rate | None = None
    """Bytes that one GPU sends in a collective among all; needed for more than one GPU."""

    def h2d_of_one(self, gpus: int) -> float:
        """Bytes per second to each of `gpus` GPUs while all are busy."""
        return min(self.h2d, self._share(gpus))

    def d2h_of_one(self, gpus: int) -> float:
        """Bytes per second from each of `gpus` GPUs while all are busy."""
        return min(self.d2h, self._share(gpus))

    def _share(self, gpus: int) -> float:
        return max(self.h2d, self.d2h) / min(gpus, self.shared_by)


class DiskDrive(_Part):
    """Below the host's memory."""

    capacity: Bytes
    read: Rate
    write: Rate


class Machine(_Part):
    """A machine as an estimate sees it. Where there is no GPU, the host computes."""

    name: str
    source: str
    """Where the figures come from."""
    gpu: Gpu | None = None
    host: Host
    links: Links | None = None
    disk: DiskDrive | None = None

    @property
    def device_memory(self) -> int:
        """Bytes of one compute tier: a GPU's, or the host's."""
        return self.gpu.memory if self.gpu is not None else self.host.memory

    def matmul_rate(self, size: int | None = None) -> float:
        """Operations per second of matrix products whose smallest side is `size`; None for large ones."""
        if self.gpu is None:
            assert self.host.matmul_tflops is not None
            return self.host.matmul_tflops * 1e12
        return self.gpu.matmul_rate(size) if size is not None else self.gpu.matmul_tflops * 1e12

    def crossing_rates(self, processes: int) -> tuple[float, float]:
        """Bytes per second to and from the device of each process while all are busy.

        Without links the host's cores copy: a copied byte is read and written.
        """
        if self.links is None:
            return self.host.memory_bandwidth / 2, self.host.memory_bandwidth / 2
        return self.links.h2d_of_one(processes), self.links.d2h_of_one(processes)


def read_machine(path: Path) -> Machine:
    """The machine that a TOML file describes. Raises ConfigError, naming the field, for one that is none."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the machine file {path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the machine file {path} is no TOML: {error}") from error
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
        raise ConfigError(f"the machine file {path}: host.matmul_tflops: needed where there is no [gpu]")
    if machine.gpu is not None and machine.links is None:
        raise ConfigError(f"the machine file {path}: links: a [gpu] needs the rates between it and the host")
    if machine.gpu and machine.gpu.count > 1 and machine.links and machine.links.gpu_gpu is None:
        raise ConfigError(f"the machine file {path}: links.gpu_gpu: needed for more than one GPU")


def known_machines() -> dict[str, Path]:
    """The machines whose files come with this package, by name."""
    folder = Path(str(resources.files("patrickstar") / "_perf_model" / "machines"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_machine(place: str) -> Machine:
    """The machine that `place` means: the name of one that comes with the package, or a TOML file.

    Raises ConfigError, with the nearest names, if it means none.
    """
    known = known_machines()
    if place in known:
        return read_machine(known[place])
    if Path(place).is_file():
        return read_machine(Path(place))
    nearest = get_close_matches(place, known, n=3, cutoff=0.3) or list(known)
    raise ConfigError(f"{place!r} is no machine known here, and no file; did you mean {', '.join(nearest)}?")
