"""Simulated clock and channels of a dry run: transfers that take the time of their bytes."""

from collections import deque
from collections.abc import Callable, Sequence

from patrickstar._dry_run.lanes import Interval, Lane, Wait, clip
from patrickstar._hardware.accelerator import DeviceClock
from patrickstar._hardware.transfer import Transfer
from patrickstar._step.update_queue import UpdateGroup

# [Note: two clocks]
# Beside a GPU the host launches operators ahead of those that run. A dry run has one clock for each of both. An
# operator begins on the device once the host has launched it: in a step that launches slowly the device waits for the
# host, and else the host's time is hidden. The host's clock follows the device's where the host waits for the device.
# Channels follow the device's clock: transfers are requested when the device gets there, which is late for those that
# a run could request ahead. Without a GPU the host computes, and has no clock of its own.


HOST = "host"
"""Name of the lane of Python and launches."""


class HostMemory:
    """Host memory that channels read and write.

    Updates and copies that run at the same time share its rate in proportion to their own. An H200's host did 133 and
    100 GB/s of them alone, and 91 and 79 together. A drive needs a small part of the rate, and gets it.

    Args:
        rate: Bytes per second, reads plus writes.
        shared_by: Channels that are slower while all together exceed the rate.
        drives: Channels that are not.
    """

    def __init__(
        self, rate: float, shared_by: "Sequence[SimulatedChannel]", drives: "Sequence[SimulatedChannel]"
    ) -> None:
        self._rate = rate
        self._channels = [*shared_by, *drives]
        for channel in shared_by:
            channel.memory = self

    def slowdown(self, begun: "SimulatedChannel", at_s: float) -> float:
        """Return how many times as long as alone a transfer takes that begins at a time on one of the channels."""
        rates = [channel.rate for channel in self._channels if channel is begun or channel.free_at > at_s]
        return max(1.0, sum(rates) / self._rate)


class SimulatedClock:
    """Clocks of a dry run, in seconds since its start. It records who waits, in the same time.

    See [Note: two clocks].
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the device, and of all channels."""
        self.host = 0.0
        """Time of the host. If it is later, the host is the slower one; if not, it is ahead of the device."""
        self.waits: list[Wait] = []
        """Waits since the step's start."""
        self.phase: Callable[[], str] = str
        """Returns the part of the step that runs; nothing before the first step."""

    def wait_for_device(self) -> None:
        """Let the host wait until the device has finished its work so far."""
        self.host = max(self.host, self.now)

    def wait_for_host(self) -> None:
        """Let the device wait until the host has launched its work so far."""
        start_s, self.now = self.now, max(self.now, self.host)
        self.record_wait(start_s, HOST, "launches")

    def record_wait(self, start_s: float, channel: str, label: str) -> None:
        """Record a wait from `start_s` until now, if it took time."""
        if start_s < self.now:
            self.waits.append(Wait(start_s, self.now - start_s, channel, label, self.phase()))


class SimulatedTransfer(Transfer):
    """Transfer on a simulated channel; waiting for it advances the clock.

    Args:
        after: Transfer that this one follows page by page: it neither begins nor ends before that.
        seconds: Time that it takes. Default: that of its bytes at the rate of the channel.
    """

    def __init__(
        self,
        channel: "SimulatedChannel",
        nbytes: int,
        label: str,
        after: "SimulatedTransfer | None" = None,
        seconds: float | None = None,
    ) -> None:
        self.channel = channel
        self.nbytes = nbytes
        self.label = label
        self.after = after
        self.seconds = nbytes / channel.rate if seconds is None else seconds
        self.requested_at = channel.clock.now
        self.ends_at: float | None = None

    def __repr__(self) -> str:
        return f"SimulatedTransfer({self.label!r}, {self.nbytes} bytes on {self.channel.name})"

    @property
    def done(self) -> bool:
        self.channel.catch_up()
        return self.ends_at is not None and self.ends_at <= self.channel.clock.now

    def interval(self, clock: DeviceClock | None) -> tuple[float, float] | None:
        """Return its begin and end on the channel, once both have passed."""
        return (self.ends_at - self.seconds, self.ends_at) if self.done and self.ends_at is not None else None

    @property
    def may_begin(self) -> bool:
        """True unless it would have to wait for pages of the transfer that it follows."""
        if self.after is None:
            return True
        self.after.channel.catch_up()
        ends_at = self.after.ends_at
        return ends_at is not None and ends_at - self.seconds <= self.channel.clock.now

    def wait(self) -> None:
        if self.after is not None:
            self.after.wait()
        start_s = self.channel.clock.now
        while not self.done:
            self.channel.clock.now = self.channel.free_at
        self.channel.clock.record_wait(start_s, self.channel.name, self.label)
        if self.channel.blocks_host:
            self.channel.clock.wait_for_device()

    def prioritize(self) -> None:
        self.channel.catch_up()
        if self in self.channel.waiting:
            self.channel.waiting.remove(self)
            self.channel.waiting.appendleft(self)

    def cancel(self) -> None:
        if self in self.channel.waiting:
            self.channel.waiting.remove(self)
        self.ends_at = self.channel.clock.now


class SimulatedUpdate(UpdateGroup):
    """Update on the host whose copies in both directions overlap with the kernel, page by page."""

    parts: Sequence[SimulatedTransfer]

    def withdraw(self) -> bool:
        if any(part not in part.channel.waiting for part in self.parts if part.nbytes):
            return False
        self.cancel()
        return True


class SimulatedChannel:
    """Channel that runs one transfer at a time, in request order, urgent transfers first.

    Args:
        blocks_host: True if the host waits for transfers, False if only work on the device is ordered after them.
    """

    def __init__(self, name: str, rate: float, clock: SimulatedClock, blocks_host: bool = False) -> None:
        self.name = name
        self.blocks_host = blocks_host
        self.rate = rate
        """Bytes per second."""
        self.clock = clock
        self.memory: HostMemory | None = None
        """What its bytes pass through, shared with other channels."""
        self.waiting: deque[SimulatedTransfer] = deque()
        self.free_at = 0.0
        """End time of the last transfer that has begun."""
        self.busy_s, self.nbytes = 0.0, 0
        """Time and bytes of the transfers that have begun since the step's start."""
        self.begun: list[Interval] = []
        """Transfers that have begun, except those that ended before the step."""

    def begin(
        self,
        nbytes: int,
        label: str,
        urgent: bool = False,
        after: SimulatedTransfer | None = None,
        seconds: float | None = None,
    ) -> SimulatedTransfer:
        """Request a transfer; see `SimulatedTransfer`. An `urgent` one is the next to begin."""
        self.catch_up()
        transfer = SimulatedTransfer(self, nbytes, label, after, seconds)
        if urgent:
            self.waiting.appendleft(transfer)
        else:
            self.waiting.append(transfer)
        self.catch_up()
        return transfer

    def run(self, nbytes: int, label: str) -> None:
        """Run an urgent transfer of `nbytes` and wait for it."""
        self.begin(nbytes, label, urgent=True).wait()

    def catch_up(self) -> None:
        """Start the queued transfers whose turn has come by the current time."""
        while self.free_at <= self.clock.now:
            transfer = next((waiting for waiting in self.waiting if waiting.may_begin), None)
            if transfer is None:
                return
            self.waiting.remove(transfer)
            if self.memory is not None:
                transfer.seconds *= self.memory.slowdown(self, self._times(transfer, self.free_at)[0])
            begins_at, ends_at = self._times(transfer, self.free_at)
            transfer.ends_at = self.free_at = ends_at
            self.begun.append(Interval(begins_at, self.free_at, transfer.label))
            self.busy_s += transfer.seconds
            self.nbytes += transfer.nbytes

    def _times(self, transfer: SimulatedTransfer, free_at: float) -> tuple[float, float]:
        """Return begin and end of a transfer on the channel that is free from `free_at` on."""
        begins_at = max(free_at, transfer.requested_at)
        if transfer.after is not None and transfer.after.ends_at is not None:
            begins_at = max(begins_at, transfer.after.ends_at - transfer.seconds)
        return begins_at, begins_at + transfer.seconds

    @property
    def left_s(self) -> float:
        """Seconds of the transfers that it was asked for, and has not ended."""
        return max(0.0, self.free_at - self.clock.now) + sum(transfer.seconds for transfer in self.waiting)

    def start_step(self) -> None:
        """Forget the transfers that have ended, and the time and bytes of all."""
        self.busy_s, self.nbytes = 0.0, 0
        self.begun = [interval for interval in self.begun if interval.end_s > self.clock.now]

    def lane(self, start_s: float) -> Lane:
        """Return the transfers from `start_s` until now, relative to `start_s`."""
        begun, free_at = list(self.begun), self.free_at
        # Queued transfers begin when somebody asks next, at times that may have passed. `catch_up` would change what
        # can still be cancelled.
        for transfer in self.waiting:
            if not transfer.may_begin:
                continue
            begins_at, free_at = self._times(transfer, free_at)
            begun.append(Interval(begins_at, free_at, transfer.label))
        return Lane(self.name, clip(begun, start_s, self.clock.now))
