"""Performance model of a recorded step: its time with more memory, other rates or another batch, as an estimate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import PARAM16
from patrickstar._perf_model.channels import total
from patrickstar._perf_model.linear_program import Expression, value
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine
from patrickstar._perf_model.perf_model import ONE_PROCESS
from patrickstar._perf_model.step_program import StepProgram
from patrickstar._perf_model.workload import PARAM_BYTES, STATE_BYTES, UPDATE_BYTES, Workload
from patrickstar._report.memory_curves import STATES, category_of
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import NamedStall, stalled_s
from patrickstar._schedule.step_timeline import Channel, StepTimeline, Work

UNBOUNDED_BYTES = 1 << 60
"""Capacity of a disk, which a log does not have."""
TOLERANCE = 0.1
"""Share of a step by which the model may be slower than the step was, as the rates of one step vary."""
LINKS, DISK = (Channel.TO_DEVICE, Channel.TO_HOST), (Channel.DISK_READ, Channel.DISK_WRITE)


class NoEstimateError(Exception):
    """The performance model does not describe the step; the message says why, as the part of a sentence."""


@dataclass(frozen=True)
class StepModel:
    """Linear program of a recorded step, whose channels have the rates that were measured in it.

    Attributes:
        params: Elements of the parameters, with padding.
        device_bytes: Budget of the device.
        host_bytes: Budget of the host without buffers and offloaded activations.
        non_model_bytes: Mean of the non-model data on the device. A plan uses the memory that they leave free below
            their peak.
        non_model_peak_bytes: Their peak.
        working_bytes: Parameters that an operator needs at once, at most.
        compute_s: Seconds in which computation did not wait. Updates within the training thread are a part of it.
        batch_s: Part of these seconds that is proportional to the batch: before the optimizer step.
        rates: Bytes per second of each channel that the step used.
        measured_s: Seconds of the step.
        exposed: Waits of the step beyond the busiest channel, relative to the seconds of its slowest transfers: what
            is not hidden by computation. The estimate assumes the same with other memory and rates.
    """

    params: int
    device_bytes: int
    host_bytes: int
    non_model_bytes: float
    non_model_peak_bytes: int
    working_bytes: int
    compute_s: float
    batch_s: float
    rates: dict[Channel, float]
    measured_s: float
    exposed: float = 0.0

    @classmethod
    def of(cls, run: Run, timeline: StepTimeline, stalls: Sequence[NamedStall]) -> Self:
        """Return the model of a recorded step.

        Raises:
            NoEstimateError: The model does not describe this run or this step.
        """
        _check_run(run, timeline)
        waited_s = stalled_s(stalls)
        model = cls(
            params=sum(_param16(run).values()) // PARAM_BYTES,
            device_bytes=run.description["device_budget_bytes"],
            host_bytes=run.description["host_budget_bytes"] - max((n for _, n in timeline.host_other), default=0),
            non_model_bytes=_mean(timeline.non_model, timeline.end_s),
            non_model_peak_bytes=max((nbytes for _, nbytes in timeline.non_model), default=0),
            working_bytes=_working_bytes(run, timeline),
            compute_s=timeline.seconds - waited_s,
            batch_s=_before_update_s(timeline, stalls),
            rates=_rates(run, timeline),
            measured_s=timeline.seconds,
        )
        bound_s, transfers_s = model._solve()
        if bound_s > (1 + TOLERANCE) * timeline.seconds:
            raise NoEstimateError(
                f"by the performance model the step takes {bound_s:.3f} s at the measured rates, longer than it took"
            )
        if not transfers_s:
            raise NoEstimateError("by the performance model everything fits on the device, and nothing is transferred")
        return replace(model, exposed=max(0.0, timeline.seconds - bound_s) / transfers_s)

    @property
    def lacking_device_bytes(self) -> int:
        """Bytes by which the device is too small for all parameters and states."""
        model_data_bytes = (PARAM_BYTES + STATE_BYTES) * self.params
        return max(0, round(model_data_bytes + self.non_model_bytes + self.working_bytes) - self.device_bytes)

    @property
    def twice_the_batch_fits(self) -> bool:
        """True if twice the peak of the non-model data fits on the device beside the parameters in use."""
        return 2 * self.non_model_peak_bytes + self.working_bytes <= self.device_bytes

    def seconds(self) -> float:
        """Return the estimated seconds of the step.

        Raises:
            NoEstimateError: Nothing fits.
        """
        bound_s, transfers_s = self._solve()
        return bound_s + self.exposed * transfers_s

    def with_memory(self, device_bytes: int = 0, host_bytes: int = 0) -> Self:
        """Return the model with more memory."""
        return replace(self, device_bytes=self.device_bytes + device_bytes, host_bytes=self.host_bytes + host_bytes)

    def with_twice_the_rate(self, channels: Sequence[Channel]) -> Self:
        """Return the model in which these channels are twice as fast."""
        return replace(self, rates=self.rates | {each: 2 * self.rates[each] for each in channels if each in self.rates})

    def with_twice_the_batch(self) -> Self:
        """Return the model of a step with twice the batch."""
        return replace(
            self,
            compute_s=self.compute_s + self.batch_s,
            batch_s=2 * self.batch_s,
            non_model_bytes=2 * self.non_model_bytes,
            non_model_peak_bytes=2 * self.non_model_peak_bytes,
        )

    def _solve(self) -> tuple[float, float]:
        """Return the seconds of the busiest resource, at their minimum, and of the slowest transfers or updates."""
        program = StepProgram(self._workload, self._machine, ONE_PROCESS)
        busy = self._busy(program)
        limits = [seconds - program.time for seconds in (*busy, self.compute_s * program.one)]
        fastest = program.minimize(program.time, *limits)
        if fastest is None:
            raise NoEstimateError("the performance model finds no placement within the budgets")
        # Of equally fast solutions, the one with the fewest transfers, as `perf_model.estimate` does.
        time_limit = program.time - program.one * value(program.time, fastest)
        solution = program.minimize(total(busy), *limits, time_limit)
        solution = fastest if solution is None else solution
        return value(program.time, solution), max(value(seconds, solution) for seconds in busy)

    def _busy(self, program: StepProgram) -> list[Expression]:
        """Return the seconds of each channel that works beside computation."""
        busy = [each.seconds for each in program.channels() if each.name in (*LINKS, *DISK)]
        if Channel.UPDATE in self.rates:
            (data,) = program.model_data
            traffic = UPDATE_BYTES * data.owned * program.one - data.device_update_bytes
            # A record counts the bytes that an update reads, which are half of its traffic.
            busy.append(traffic / 2 / self.rates[Channel.UPDATE])
        return busy

    @property
    def _workload(self) -> Workload:
        return Workload(
            params=self.params,
            batch=1,
            tokens=1,
            checkpointing=False,
            operations=0.0,
            matrix_size=1,
            non_model_bytes=round(self.non_model_bytes),
            working_bytes=self.working_bytes,
        )

    @property
    def _machine(self) -> Machine:
        """Machine with the budgets and the rates of the step; those of computation and of the memories are not used."""
        read, write = (self.rates.get(channel) for channel in DISK)
        disk = None if read is None or write is None else DiskDrive(capacity=UNBOUNDED_BYTES, read=read, write=write)
        return Machine(
            name="recorded",
            source="a recorded step",
            gpu=Gpu(count=1, memory=self.device_bytes, matmul_tflops=1.0, memory_bandwidth=1.0),
            host=Host(memory=self.host_bytes, memory_bandwidth=1.0, cores=1),
            links=Links(h2d=self.rates[Channel.TO_DEVICE], d2h=self.rates[Channel.TO_HOST]),
            disk=disk,
        )


def _check_run(run: Run, timeline: StepTimeline) -> None:
    """Raise NoEstimateError for what the performance model does not describe."""
    about = run.description
    if about["processes"] > 1:
        raise NoEstimateError("the step of one of several processes waits for the others, too")
    if about["precision"] not in ("bf16", "fp16"):
        raise NoEstimateError(
            f"the performance model describes parameters of 16 bits, and these are {about['precision']}"
        )
    states = sum(nbytes for kind, _, nbytes in about["chunks"] if category_of(kind) == STATES)
    params = sum(_param16(run).values())
    if round(states * PARAM_BYTES) != round(params * STATE_BYTES):
        raise NoEstimateError(
            f"the performance model describes {STATE_BYTES} bytes of masters and states per trained parameter (AdamW), "
            f"and this run has {format_size(states)} for {format_size(params)} of parameters"
        )
    passes = sum(name == "backward" for _, name in timeline.phases)
    if passes != 1:
        raise NoEstimateError(f"the performance model describes a step of one backward, and this one has {passes}")


def _param16(run: Run) -> dict[int, int]:
    """Return the bytes of each chunk of parameters by its index."""
    return {index: nbytes for kind, index, nbytes in run.description["chunks"] if kind == PARAM16}


def _working_bytes(run: Run, timeline: StepTimeline) -> int:
    sizes = _param16(run)
    moments = [sum(sizes.get(index, 0) for index in moment.chunks) for moment in timeline.moments]
    return max(moments, default=0) or max(sizes.values())


def _mean(values: Sequence[tuple[float, int]], end_s: float) -> float:
    """Return the mean over time of a value that was noted whenever it changed."""
    if not values or values[0][0] >= end_s:
        return 0.0
    spans = pairwise([*values, (end_s, 0)])
    return sum(nbytes * (until_s - at_s) for (at_s, nbytes), (until_s, _) in spans) / (end_s - values[0][0])


def _before_update_s(timeline: StepTimeline, stalls: Sequence[NamedStall]) -> float:
    """Return the seconds of computation before the optimizer step."""
    until_s = next((at_s for at_s, name in timeline.phases if name == "step"), timeline.end_s)
    waits = [stall for stall in stalls if stall.end_s <= until_s]
    return max(0.0, until_s - timeline.start_s - stalled_s(waits))


def _rates(run: Run, timeline: StepTimeline) -> dict[Channel, float]:
    """Return the measured rates. A direction without work has the rate of the other one.

    Raises:
        NoEstimateError: Nothing was copied.
    """
    rates = {channel: rate for channel in Channel if (rate := channel_rate(timeline, channel)) is not None}
    for pair in (LINKS, DISK):
        known = [rates[channel] for channel in pair if channel in rates]
        rates |= {channel: known[0] for channel in pair if channel not in rates and known}
    if Channel.TO_DEVICE not in rates:
        raise NoEstimateError("no copy between host and device was recorded in this step, whose rate it needs")
    if run.description["device"] == "cpu" and run.description["disk"] is None:
        rates.pop(Channel.UPDATE, None)  # the training thread updates: it is a part of computation
    return rates


def channel_rate(timeline: StepTimeline, channel: Channel) -> float | None:
    """Return the bytes per second of a channel while it was busy; None if no work of it was recorded."""
    works = [work for work in timeline.work if work.channel is channel and work.nbytes]
    busy_s = _busy_s(works)
    return sum(work.nbytes for work in works) / busy_s if busy_s > 0 else None


def _busy_s(works: Sequence[Work]) -> float:
    """Return the seconds in which at least one of some works ran."""
    busy_s, until_s = 0.0, float("-inf")
    for work in sorted(works, key=lambda each: each.start_s):
        busy_s += max(0.0, work.end_s - max(work.start_s, until_s))
        until_s = max(until_s, work.end_s)
    return busy_s
