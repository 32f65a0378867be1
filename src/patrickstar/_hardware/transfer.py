"""Interface of what is in flight, whatever runs it: threads, GPU streams, collectives, kernels or a simulation."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from patrickstar._hardware.accelerator import DeviceClock


class Transfer(Protocol):
    """Copy, page I/O, collective or update that runs beside the training thread."""

    label: str
    """Name of what is transferred, for errors and profiles."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {'done' if self.done else 'in flight'})"

    @property
    def started(self) -> bool:
        """False while it waits for an agreement of all processes."""
        return True

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once it has ended, with or without an error."""

    def interval(self, clock: DeviceClock | None) -> tuple[float, float] | None:
        """Return its begin and end in seconds of the hardware's clock; None if it is not done, or they are unknown.

        Args:
            clock: Clock of the accelerator, for transfers that were timed on it.
        """
        return None

    @abstractmethod
    def wait(self) -> None:
        """Wait for its end, and raise its error, at every call."""

    @abstractmethod
    def prioritize(self) -> None:
        """Move it ahead of others that wait, if their order may change."""

    def withdraw(self) -> bool:
        """Cancel it if it is known not to have begun. Return True if it was cancelled."""
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Cancel what has not begun, and wait for the rest without raising its error."""


class Deferred(Transfer):
    """Work that the training thread ends itself, by a call, when it waits for it."""

    def __init__(self, label: str, end: Callable[[], None]) -> None:
        self.label = label
        self._end = end

    @property
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        """End it, and raise its error."""
        self._end()

    def prioritize(self) -> None:
        """Do nothing: it runs in the thread that waits."""

    def cancel(self) -> None:
        """Do nothing: whoever began it cancels it."""


class CompletedTransfer(Transfer):
    """Transfer of nothing."""

    def __init__(self, label: str) -> None:
        self.label = label

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""

    def prioritize(self) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Do nothing."""
