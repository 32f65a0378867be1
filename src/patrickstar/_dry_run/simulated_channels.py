"""Simulated channels: serial transfers at a given rate on a simulated clock."""

from collections import deque

from patrickstar._memory.worker_pool import Transfer


class SimulatedClock:
    """Clock of a dry run, in seconds since its start."""

    def __init__(self) -> None:
        self.now = 0.0


class SimulatedTransfer(Transfer):
    """Transfer on a simulated channel; waiting for it advances the clock."""

    def __init__(self, channel: "SimulatedChannel", nbytes: int, label: str) -> None:
        self.channel = channel
        self.nbytes = nbytes
        self.label = label
        self.requested_at = channel.clock.now
        self.ends_at: float | None = None

    def __repr__(self) -> str:
        return f"SimulatedTransfer({self.label!r}, {self.nbytes} bytes on {self.channel.name})"

    @property
    def done(self) -> bool:
        self.channel.catch_up()
        return self.ends_at is not None and self.ends_at <= self.channel.clock.now

    def wait(self) -> None:
        while not self.done:
            self.channel.clock.now = self.channel.free_at

    def prioritize(self) -> None:
        self.channel.catch_up()
        if self in self.channel.waiting:
            self.channel.waiting.remove(self)
            self.channel.waiting.appendleft(self)

    def cancel(self) -> None:
        if self in self.channel.waiting:
            self.channel.waiting.remove(self)
        self.ends_at = self.channel.clock.now


class SimulatedChannel:
    """Channel that runs one transfer at a time, in request order, urgent transfers first."""

    def __init__(self, name: str, rate: float, clock: SimulatedClock) -> None:
        self.name = name
        self.rate = rate
        """Bytes per second."""
        self.clock = clock
        self.waiting: deque[SimulatedTransfer] = deque()
        self.free_at = 0.0
        """End time of the last transfer that has begun."""
        self.busy_s = 0.0
        self.nbytes = 0

    def begin(self, nbytes: int, label: str, urgent: bool = False) -> SimulatedTransfer:
        """Queue a transfer of `nbytes`."""
        self.catch_up()
        transfer = SimulatedTransfer(self, nbytes, label)
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
        while self.waiting and self.free_at <= self.clock.now:
            transfer = self.waiting.popleft()
            seconds = transfer.nbytes / self.rate
            transfer.ends_at = self.free_at = max(self.free_at, transfer.requested_at) + seconds
            self.busy_s += seconds
            self.nbytes += transfer.nbytes
