"""Machines described by their parts: a GPU by name, sizes of memory and disk. The rest is assumed, and said."""

import re
import tomllib
from difflib import get_close_matches
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from patrickstar._layout.byte_size import parse_size
from patrickstar._perf_model.machine_spec import Bytes, DiskDrive, Gpu, Host, Links, Machine, Rate
from patrickstar.errors import ConfigError

DESKTOP_MEMORY, SERVER_MEMORY = 64 * 10**9, 512 * 10**9
"""Host memory where none is given, per machine."""
NVME_READ, NVME_WRITE = 7e9, 5e9
"""Rates of a drive on four lanes of PCIe 4, typical data-sheet values, where none are given."""
PCIE_PEERS = 0.4
"""Share of the link's rate that a GPU sends in a collective without NVLink: bytes pass through host memory, twice."""


class GpuPart(BaseModel):
    """GPU by part; see `gpus.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory: Bytes
    matmul_tflops: float
    fp32_tflops: float
    half_rate_size: int
    memory_bandwidth: Rate
    pcie: Rate
    """Bytes per second and direction between the GPU and page-locked host memory."""
    nvlink: Rate | None = None
    """Bytes per second that a GPU sends in a collective over links between GPUs; None without."""
    desktop: bool
    """True if the host is a desktop computer, False if it is a server with two sockets."""


def known_gpus() -> dict[str, GpuPart]:
    """Return the GPUs that are known by name."""
    file = resources.files("patrickstar._perf_model") / "gpus.toml"
    return {name: GpuPart.model_validate(part) for name, part in tomllib.loads(file.read_text()).items()}


def find_gpu(name: str) -> tuple[str, GpuPart]:
    """Return a GPU and its usual name.

    Args:
        name: As people write it, such as "RTX 4090" or "A100-80GB".

    Raises:
        ConfigError: It is unknown; the message lists the nearest names.
    """
    known = known_gpus()
    plain = name.lower().replace("geforce", "").replace("nvidia", "").replace("_", "-").strip()
    for wanted in (plain, plain.replace(" ", ""), plain.replace(" ", "-"), f"rtx{plain}", f"{plain}-80gb"):
        if wanted in known:
            return wanted, known[wanted]
    nearest = get_close_matches(plain.replace(" ", ""), known, n=3, cutoff=0.3) or list(known)
    raise ConfigError(
        f"--gpu {name}: it is not known; did you mean {', '.join(nearest)}? Describe others in a file for --machine"
    )


def machine_of_parts(gpu: str, count: int = 1, host_memory: str | None = None, disk: str | None = None) -> Machine:
    """Return the machine with these parts.

    Args:
        gpu: Name of its GPUs.
        count: Number of its GPUs.
        host_memory: Size of its memory, such as "64GB". Default: that of a usual machine with such a GPU.
        disk: Its drive; see `parse_disk`. Default: none.

    Raises:
        ConfigError: A part is unknown or invalid.
    """
    name, part = find_gpu(gpu)
    memory = parse_size(host_memory) if host_memory is not None else _usual_memory(part)
    host: dict[str, Any] = {"memory": memory, "page_lock": 5e9}  # the latter as H200.toml
    if part.desktop:
        host |= {"memory_bandwidth": 67e9, "cores": 16}  # as RTX4090-desktop.toml
        described = "a desktop with two channels of DDR5-5600 and 16 cores"
    else:
        host |= {"memory_bandwidth": 430e9, "cores": 96, "sockets": 2, "core_bandwidth": 12e9}  # as H200.toml
        described = "a server with two sockets of eight channels of DDR5-4800 and 96 cores"
    title = f"{count} x {name}" if count > 1 else name
    return Machine(
        name=f"{title} with {_as_written(host_memory) if host_memory else f'{memory / 1e9:g} GB'} of host memory",
        source=f"{title} in {described}, which is assumed; rates of the GPU as in gpus.toml",
        gpu=Gpu(
            count=count,
            memory=part.memory,
            matmul_tflops=part.matmul_tflops,
            fp32_tflops=part.fp32_tflops,
            half_rate_size=part.half_rate_size,
            memory_bandwidth=part.memory_bandwidth,
        ),
        host=Host(**host),
        links=Links(
            h2d=part.pcie,
            d2h=part.pcie,
            gpu_gpu=part.nvlink or rate_through_host(part.pcie, host["memory_bandwidth"], count),
        ),
        disk=None if disk is None else parse_disk(disk),
    )


def rate_through_host(link: float, memory_bandwidth: float, gpus: int) -> float:
    """Return the bytes per second that each of `gpus` GPUs without links between them sends in a collective.

    Bytes pass through the host's memory, which all GPUs write and read.
    """
    return min(PCIE_PEERS * link, memory_bandwidth / (2 * gpus))


def _as_written(size: str) -> str:
    """Return a size as it was written, with a space before its unit."""
    return re.sub(r"(?<=\d)\s*(?=[a-zA-Z])", " ", size.strip())


def _usual_memory(part: GpuPart) -> int:
    return DESKTOP_MEMORY if part.desktop else SERVER_MEMORY


def parse_disk(text: str) -> DiskDrive:
    """Return the drive of a description.

    Args:
        text: Capacity, and rates of reading and writing if they are known: "1TB", "1TB:7GB/s" or "2TB:7GB/s:5GB/s".
            Where one rate is given, the drive writes as fast as it reads.

    Raises:
        ConfigError: It is none.
    """
    capacity, *rates = text.split(":")
    if len(rates) > 2 or any(not rate.strip().endswith("/s") for rate in rates):
        raise ConfigError(f"--disk {text}: write the capacity and the rates, as in 1TB:7GB/s or 2TB:7GB/s:5GB/s")
    try:
        sizes = [float(parse_size(rate.strip().removesuffix("/s"))) for rate in rates]
        read, write = (NVME_READ, NVME_WRITE) if not sizes else (sizes[0], sizes[-1])
        return DiskDrive(capacity=parse_size(capacity), read=read, write=write)
    except (ConfigError, ValidationError) as error:
        raise ConfigError(f"--disk {text}: {error}") from None


def parse_rate(text: str, option: str) -> float:
    """Return the bytes per second of a rate such as "170GB/s".

    Raises:
        ConfigError: It is none; the message names the option.
    """
    try:
        return float(parse_size(text.strip().removesuffix("/s")))
    except ConfigError as error:
        raise ConfigError(f"{option}={text!r}: write a rate such as 170GB/s") from error
