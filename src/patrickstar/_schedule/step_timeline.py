"""Record of what one step did: the work of each channel, the waits of computation, and the memory of each chunk."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from patrickstar._schedule.placement import Tier

LOG_FORMAT = 1
"""Version of the log of a run, of which timelines are a part."""


def chunk_index(label: str) -> int | None:
    """Return the index of the chunk that a label such as `param16[12]` names; None if it names none."""
    index = re.search(r"\[(\d+)\]$", label)
    return None if index is None else int(index[1])


class Channel(StrEnum):
    """Channel that works beside computation; a dry run's have the same names."""

    TO_DEVICE = "host to device"
    TO_HOST = "device to host"
    DISK_READ = "disk read"
    DISK_WRITE = "disk write"
    UPDATE = "update on the host"
    COLLECTIVES = "collectives"


@dataclass(frozen=True)
class Work:
    """Work of a channel. Times are seconds of the hardware's clock."""

    channel: Channel
    label: str
    """Name of the chunk, or of what else was moved or computed."""
    nbytes: int
    asked_s: float
    """When it was requested."""
    start_s: float
    end_s: float
    urgent: bool
    """True if it was requested only when its bytes were needed."""

    @property
    def times(self) -> tuple[float, float, float]:
        """Times of the request, of the begin and of the end."""
        return self.asked_s, self.start_s, self.end_s


@dataclass(frozen=True)
class Stall:
    """Time in which computation waited: the training thread, or beside an accelerator its stream."""

    start_s: float
    end_s: float
    label: str


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of a chunk on one tier, from a time on."""

    at_s: float
    tier: Tier
    kind: str
    index: int
    nbytes: int
    present: bool


@dataclass(frozen=True)
class ChunkAccess:
    """Access of an operator to chunks of parameters; none once it has ended."""

    at_s: float
    number: int
    """Number of the moment in the iteration's trace; -1 where there is none."""
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """Products of activations and one parameter in a step on a CPU: all of its forwards, or of its backwards."""

    name: str
    """Name of the parameter."""
    backward: bool
    operations: int
    """Multiplications and additions."""
    seconds: float
    """Time of the training thread, whatever number of threads computed."""


@dataclass
class StepTimeline:
    """Record of one step, from the end of the step before to its own. Times are seconds of the hardware's clock.

    Attributes:
        step: Number of the step, from 1.
        initial: Chunks with memory on a tier at the start.
        gradients: Times from which a chunk of parameters held gradients, and at which it held parameters again.
        phases: Times at which a part of the step began: forward, backward, step.
        non_model: Bytes of non-model data on the device, as expected or measured, from a time on.
        host_other: Bytes of the host tier beside chunks, from a time on.
        disk: Bytes of the swap file that were allocated, from a time on.
        products: Products of parameters; none beside an accelerator.
    """

    step: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    work: list[Work] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    initial: list[ChunkMemory] = field(default_factory=list)
    residency: list[ChunkMemory] = field(default_factory=list)
    moments: list[ChunkAccess] = field(default_factory=list)
    gradients: list[tuple[float, int, bool]] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)
    non_model: list[tuple[float, int]] = field(default_factory=list)
    host_other: list[tuple[float, int]] = field(default_factory=list)
    disk: list[tuple[float, int]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def as_json(self) -> dict[str, Any]:
        """Return plain data, with times in microseconds since the step's start."""

        def us(seconds: float) -> int:
            return round(1e6 * (seconds - self.start_s))

        return {
            "step": self.step,
            "us": us(self.end_s),
            "work": [
                [each.channel.value, each.label, each.nbytes, *map(us, each.times), int(each.urgent)]
                for each in self.work
            ],
            "stalls": [[us(each.start_s), us(each.end_s), each.label] for each in self.stalls],
            "initial": [[each.tier.value, each.kind, each.index, each.nbytes] for each in self.initial],
            "residency": [
                [us(each.at_s), each.tier.value, each.kind, each.index, each.nbytes, int(each.present)]
                for each in self.residency
            ],
            "moments": [[us(each.at_s), each.number, list(each.chunks)] for each in self.moments],
            "gradients": [[us(at_s), index, int(holds)] for at_s, index, holds in self.gradients],
            "phases": [[us(at_s), name] for at_s, name in self.phases],
            "non_model": [[us(at_s), nbytes] for at_s, nbytes in self.non_model],
            "host_other": [[us(at_s), nbytes] for at_s, nbytes in self.host_other],
            "disk": [[us(at_s), nbytes] for at_s, nbytes in self.disk],
            "products": [
                [each.name, int(each.backward), each.operations, round(1e6 * each.seconds)] for each in self.products
            ],
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> "StepTimeline":
        """Return the timeline of plain data, with times since the step's start.

        Raises:
            KeyError, TypeError, ValueError: It is not what `as_json` returns.
        """

        def seconds(us: float) -> float:
            return us / 1e6

        def pairs(items: Iterable[Sequence[Any]]) -> list[tuple[float, Any]]:
            return [(seconds(us), value) for us, value in items]

        return cls(
            step=int(data["step"]),
            start_s=0.0,
            end_s=seconds(data["us"]),
            work=[
                Work(Channel(channel), label, nbytes, seconds(asked), seconds(start), seconds(end), bool(urgent))
                for channel, label, nbytes, asked, start, end, urgent in data["work"]
            ],
            stalls=[Stall(seconds(start), seconds(end), label) for start, end, label in data["stalls"]],
            initial=[
                ChunkMemory(0.0, Tier(tier), kind, index, nbytes, True) for tier, kind, index, nbytes in data["initial"]
            ],
            residency=[
                ChunkMemory(seconds(at), Tier(tier), kind, index, nbytes, bool(present))
                for at, tier, kind, index, nbytes, present in data["residency"]
            ],
            moments=[ChunkAccess(seconds(at), number, tuple(chunks)) for at, number, chunks in data["moments"]],
            gradients=[(seconds(at), index, bool(holds)) for at, index, holds in data["gradients"]],
            phases=pairs(data["phases"]),
            non_model=pairs(data["non_model"]),
            host_other=pairs(data["host_other"]),
            disk=pairs(data["disk"]),
            # Logs of earlier versions have none.
            products=[
                Product(name, bool(backward), operations, seconds(us))
                for name, backward, operations, us in data.get("products", ())
            ],
        )
