"""A forecast: what a step would take, as a rehearsal found it."""

from dataclasses import dataclass

from patrickstar.engine.stats import StepStats
from patrickstar.schedule.trace import Trace


@dataclass(frozen=True)
class LaneUse:
    """What one resource did in a step."""

    name: str
    busy_s: float
    nbytes: int


@dataclass(frozen=True)
class Filled:
    """What lay where at one time of a step, in bytes."""

    at_s: float
    device_model_bytes: int
    device_non_model_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        """Model data and non-model data on the device."""
        return self.device_model_bytes + self.device_non_model_bytes


@dataclass(frozen=True)
class Forecast:
    """A step as it would go, once it is planned."""

    seconds: float
    compute_s: float
    lanes: tuple[LaneUse, ...]
    stats: StepStats
    trace: Trace
    timeline: tuple[Filled, ...]
    """What lay where as each operator ran, in their order."""
    device_budget_bytes: int
    host_budget_bytes: int
    estimated: tuple[str, ...] = ()
    """Operators that could not be measured by themselves: what they take follows from their operations and bytes."""

    @property
    def bound_s(self) -> float:
        """What the busiest resource alone takes: no plan that does this work is faster."""
        return max(self.compute_s, *(lane.busy_s for lane in self.lanes))
