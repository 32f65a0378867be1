"""Lanes: what moves bytes at a given rate, one transfer after the other, on a clock that runs on estimates."""

from collections import deque

from patrickstar._memory.worker_pool import Transfer


class SimulatedClock:
    """The time of a rehearsal, in seconds since it began."""

    def __init__(self) -> None:
        self.now = 0.0


class SimulatedTransfer(Transfer):
    """Bytes on a lane. Who waits for them has the clock go on to their end."""

    def __init__(self, lane: "SimulatedChannel", nbytes: int, what: str) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.label = what
        self.asked_at = lane.clock.now
        self.ends_at: float | None = None

    def __repr__(self) -> str:
        return f"LaneTransfer({self.label!r}, {self.nbytes} bytes on {self.lane.name})"

    @property
    def done(self) -> bool:
        self.lane.catch_up()
        return self.ends_at is not None and self.ends_at <= self.lane.clock.now

    def wait(self) -> None:
        while not self.done:
            self.lane.clock.now = self.lane.free_at

    def prioritize(self) -> None:
        self.lane.catch_up()
        if self in self.lane.waiting:
            self.lane.waiting.remove(self)
            self.lane.waiting.appendleft(self)

    def cancel(self) -> None:
        if self in self.lane.waiting:
            self.lane.waiting.remove(self)
        self.ends_at = self.lane.clock.now


class SimulatedChannel:
    """One transfer at a time, in the order in which they were asked for, urgent ones first."""

    def __init__(self, name: str, rate: float, clock: SimulatedClock) -> None:
        self.name = name
        self.rate = rate
        """Bytes per second."""
        self.clock = clock
        self.waiting: deque[SimulatedTransfer] = deque()
        self.free_at = 0.0
        """When what has begun ends."""
        self.busy_s = 0.0
        self.nbytes = 0

    def begin(self, nbytes: int, what: str, urgent: bool = False) -> SimulatedTransfer:
        """Ask for so many bytes to be moved."""
        self.catch_up()
        transfer = SimulatedTransfer(self, nbytes, what)
        if urgent:
            self.waiting.appendleft(transfer)
        else:
            self.waiting.append(transfer)
        self.catch_up()
        return transfer

    def run(self, nbytes: int, what: str) -> None:
        """The same, and wait for it."""
        self.begin(nbytes, what, urgent=True).wait()

    def catch_up(self) -> None:
        """Begin what has had its turn by now."""
        while self.waiting and self.free_at <= self.clock.now:
            transfer = self.waiting.popleft()
            seconds = transfer.nbytes / self.rate
            transfer.ends_at = self.free_at = max(self.free_at, transfer.asked_at) + seconds
            self.busy_s += seconds
            self.nbytes += transfer.nbytes
