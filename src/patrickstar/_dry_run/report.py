"""Dry-run report: predicted time, transfers and memory of one step."""

from dataclasses import dataclass

from patrickstar._dry_run.lanes import Lane, Wait, end_s, exposed_table, picture
from patrickstar._dry_run.simulated_channels import HOST
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.text_tables import (
    LINE_NAME_WIDTH,
    channels_table,
    format_seconds,
    memory_table,
    rows,
    sparkline,
)
from patrickstar._schedule.trace import Trace
from patrickstar._step.stats import StepStats


@dataclass(frozen=True)
class ChannelUse:
    """Busy time and bytes of one simulated channel in a step."""

    name: str
    busy_s: float
    nbytes: int


@dataclass(frozen=True)
class MemorySample:
    """Memory use of each tier at one time of a step."""

    at_s: float
    device_model_bytes: int
    device_non_model_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        """Model data and non-model data on the device, in bytes."""
        return self.device_model_bytes + self.device_non_model_bytes


@dataclass(frozen=True)
class DryRunReport:
    """Prediction for one planned step."""

    seconds: float
    compute_s: float
    channels: tuple[ChannelUse, ...]
    stats: StepStats
    trace: Trace
    timeline: tuple[MemorySample, ...]
    """One sample per operator, in execution order."""
    device_budget_bytes: int
    host_budget_bytes: int
    disk_capacity_bytes: int
    least_device_bytes: int
    """Largest sum of an operator's chunks and non-model data: with a smaller device budget the step does not fit,
    unless chunks are smaller."""
    peak_module: str | None
    """Module that runs when non-model data is largest; None outside of all modules."""
    lanes: tuple[Lane, ...]
    """Busy intervals of computation, of the host and of each channel, in the step's simulated time."""
    waits: tuple[Wait, ...]
    """Exposed time: each wait of computation for a channel or the host, in order. With `compute_s` they add up to
    `seconds`."""
    processes: int = 1
    """Number of simulated processes; all figures are those of the first."""
    replicas: int = 1
    """Number of replicas that they form."""
    host_s: float = 0.0
    """Seconds of the host beside a GPU: Python, autograd, the engine and launches, if they were measured. They are
    hidden, but where the device waits for the host."""
    page_lock_s: float = 0.0
    """Part of `first_step_s` in which host memory is page-locked."""
    first_step_s: float = 0.0
    """Seconds until the first step has ended, which traces the operators: without building the model."""
    estimated: tuple[str, ...] = ()
    """Operators that could not be measured in isolation; their cost is a roofline estimate."""

    def __str__(self) -> str:
        """Format the report that `patrickstar train --dry-run` prints."""
        tiers = self._tiers()
        busy = [("compute", self.compute_s, "")]
        if self.host_s:
            busy.append((HOST, self.host_s, "Python and launches"))
        busy += [(used.name, used.busy_s, format_size(used.nbytes)) for used in self.channels if used.nbytes]
        parts = [
            rows(self._rows()),
            channels_table(busy, self.seconds),
            picture(self.lanes, self.waits),
            exposed_table(self.waits, self.seconds),
            memory_table(tiers),
            "memory over the step (full height: the budget)",
        ]
        seconds = end_s(self.lanes, self.waits)
        device = [(sample.at_s, sample.device_bytes) for sample in self.timeline]
        host = [(sample.at_s, sample.host_bytes) for sample in self.timeline]
        for (name, _, capacity), samples in zip(tiers, (device, host), strict=False):
            parts.append(f"  {name:<{LINE_NAME_WIDTH}}{sparkline(samples, seconds, capacity)}")
        return "\n".join(parts)

    def _tiers(self) -> list[tuple[str, int, int]]:
        stats = self.stats
        device = max((sample.device_bytes for sample in self.timeline), default=0)
        host = max((sample.host_bytes for sample in self.timeline), default=0)
        tiers = [("device", device, self.device_budget_bytes), ("host", host, self.host_budget_bytes)]
        if stats.disk_bytes:
            tiers.append(("disk", stats.disk_bytes, self.disk_capacity_bytes))
        return tiers

    def _rows(self) -> list[tuple[str, str]]:
        stats = self.stats
        pairs = [
            ("it fits", "dry run, nothing was trained; the figures are of one planned step"),
            ("step", f"{self.seconds:.2f} s (lower bound of this plan: {self.bound_s:.2f} s)"),
            (
                "device",
                f"model data {format_size(stats.device_peak_model_bytes)}, non-model data "
                f"{format_size(stats.device_peak_non_model_bytes)} (peaks, not necessarily at the same time)",
            ),
            ("peak", f"non-model data: {self.peak}"),
            ("moved", f"{format_size(stats.h2d_bytes)} to the device, {format_size(stats.d2h_bytes)} to the host"),
        ]
        if self.processes > 1:
            replicas = f" in {self.replicas} replicas" if self.replicas > 1 else ""
            pairs.insert(1, ("processes", f"{self.processes}{replicas}; the figures are those of the first"))
            pairs.append(("sent", self._sent))
        if stats.disk_bytes:
            read, written = format_size(stats.disk_read_bytes), format_size(stats.disk_write_bytes)
            pairs.append(("disk", f"{read} read and {written} written per step"))
        if self.host_s > max(self.compute_s, *(used.busy_s for used in self.channels)):
            text = "Python and launches take the longest: larger batches or fewer, larger operators cost no more of it"
            pairs.append(("host", text))
        if self.page_lock_s:
            pairs.append(("first step", self.first_step))
        if self.estimated:
            names = ", ".join(self.estimated)
            pairs.append(("estimated", f"from operation and byte counts (not measurable in isolation): {names}"))
        return pairs

    @property
    def first_step(self) -> str:
        """When the first step ends, if memory is page-locked before."""
        return (
            f"ends after {format_seconds(self.first_step_s)}, of which page-locking host memory takes "
            f"{format_seconds(self.page_lock_s)}; building the model comes on top"
        )

    @property
    def _sent(self) -> str:
        """Bytes that the process sends to others."""
        stats = self.stats
        parts = [(stats.gathered_bytes, stats.inter_replica_gathered_bytes, "parameters")]
        parts.append((stats.reduced_bytes, stats.inter_replica_reduced_bytes, "gradients"))
        texts = []
        for total, elsewhere, what in parts:
            between = f" ({format_size(elsewhere)} to other replicas)" if self.replicas > 1 else ""
            texts.append(f"{format_size(total)} of {what}{between}")
        return ", ".join(texts)

    @property
    def peak(self) -> str:
        """Peak of non-model data, with its module."""
        where = f", in {self.peak_module}" if self.peak_module else ""
        return f"{format_size(self.stats.device_peak_non_model_bytes)}{where}"

    @property
    def bound_s(self) -> float:
        """Busy time of the busiest resource: a lower bound for any plan with the same work."""
        return max(self.compute_s, self.host_s, *(used.busy_s for used in self.channels))
