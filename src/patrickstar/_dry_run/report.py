"""A forecast: what a step would take, as a rehearsal found it."""

from dataclasses import dataclass

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.text_tables import ChannelRow, TierRow, channels_table, memory_table, picture, rows
from patrickstar._schedule.trace import Trace
from patrickstar._step.stats import StepStats


@dataclass(frozen=True)
class ChannelUse:
    """What one resource did in a step."""

    name: str
    busy_s: float
    nbytes: int


@dataclass(frozen=True)
class MemorySample:
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
class DryRunReport:
    """A step as it would go, once it is planned."""

    seconds: float
    compute_s: float
    channels: tuple[ChannelUse, ...]
    stats: StepStats
    trace: Trace
    timeline: tuple[MemorySample, ...]
    """What lay where as each operator ran, in their order."""
    device_budget_bytes: int
    host_budget_bytes: int
    disk_capacity_bytes: int
    estimated: tuple[str, ...] = ()
    """Operators that could not be measured by themselves: what they take follows from their operations and bytes."""

    def __str__(self) -> str:
        """The report that `patrickstar train --dry-run` prints."""
        tiers = self._tiers()
        channels = [
            ChannelRow(lane.name, lane.busy_s, format_size(lane.nbytes)) for lane in self.channels if lane.nbytes
        ]
        parts = [
            rows(self._rows()),
            channels_table([ChannelRow("compute", self.compute_s, ""), *channels], self.seconds),
            memory_table(tiers),
            "over the step, full is the budget",
        ]
        spent_s = self.timeline[-1].at_s if self.timeline else 0.0
        device = [(one.at_s, one.device_bytes) for one in self.timeline]
        host = [(one.at_s, one.host_bytes) for one in self.timeline]
        for tier, samples in zip(tiers, (device, host), strict=False):
            parts.append(f"  {tier.name:<8}{picture(samples, spent_s, tier.there_bytes)}")
        return "\n".join(parts)

    def _tiers(self) -> list[TierRow]:
        stats = self.stats
        device = max((one.device_bytes for one in self.timeline), default=0)
        host = max((one.host_bytes for one in self.timeline), default=0)
        tiers = [TierRow("device", device, self.device_budget_bytes), TierRow("host", host, self.host_budget_bytes)]
        if stats.disk_bytes:
            tiers.append(TierRow("disk", stats.disk_bytes, self.disk_capacity_bytes))
        return tiers

    def _rows(self) -> list[tuple[str, str]]:
        stats = self.stats
        found = [
            ("it fits", "nothing was trained; what follows is a step once it is planned"),
            ("step", f"{self.seconds:.2f} s, not below {self.bound_s:.2f} s with this plan"),
            (
                "device",
                f"model data {format_size(stats.device_peak_model_bytes)}, non-model data "
                f"{format_size(stats.device_peak_non_model_bytes)} at their peaks, which need not be at one time",
            ),
            ("moved", f"{format_size(stats.h2d_bytes)} to the device, {format_size(stats.d2h_bytes)} to the host"),
        ]
        if stats.disk_bytes:
            read, written = format_size(stats.disk_read_bytes), format_size(stats.disk_write_bytes)
            found.append(("disk", f"{read} read and {written} written in a step"))
        if self.estimated:
            names = ", ".join(self.estimated)
            found.append(("estimated", f"from operations and bytes, as they can't be measured by themselves: {names}"))
        return found

    @property
    def bound_s(self) -> float:
        """What the busiest resource alone takes: no plan that does this work is faster."""
        return max(self.compute_s, *(lane.busy_s for lane in self.channels))
