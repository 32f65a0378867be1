"""Frontier of a plan: tokens per second over the memory of a tier."""

from collections.abc import Iterator
from dataclasses import dataclass

from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._plan.upgrades import BestEstimate

FACTORS = tuple(2 ** (exponent / 2) for exponent in range(-4, 5))
"""Sizes of memory relative to the machine's: from a quarter to four times, two per doubling."""


@dataclass(frozen=True)
class Frontier:
    """Most tokens per second over the memory of one tier, while the rest of the machine stays the same.

    Attributes:
        tier: Name of the tier.
        points: Bytes, and the estimate's tokens per second with them; sizes in which the model does not fit are absent.
    """

    tier: str
    points: tuple[tuple[int, float], ...]


def frontiers(machine: Machine, mesh: Mesh, best: BestEstimate) -> tuple[Frontier, ...]:
    """Return the frontier of each tier in memory."""
    found = []
    for tier, sizes in _sizes(machine):
        points, most = [], 0.0
        for nbytes, changed in sizes:
            if (estimate := best(changed, mesh)) is not None:
                most = max(most, estimate.tokens_per_s)  # memory that is of no use may be left
                points.append((nbytes, most))
        found.append(Frontier(tier, tuple(points)))
    return tuple(found)


def _sizes(machine: Machine) -> Iterator[tuple[str, list[tuple[int, Machine]]]]:
    """Yield each tier with sizes of its memory, and the machine with each of them."""
    for tier, part in (("device memory", machine.gpu), ("host memory", machine.host)):
        if part is None:
            continue
        name, changed = "gpu" if part is machine.gpu else "host", []
        for factor in FACTORS:
            nbytes = round(factor * part.memory)
            changed.append((nbytes, machine.model_copy(update={name: part.model_copy(update={"memory": nbytes})})))
        yield tier, changed
