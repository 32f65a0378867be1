"""Exceptions that PatrickStar raises. Messages name the parameter or chunk, the bytes, and what to try."""


class PatrickStarError(Exception):
    """Base class of all PatrickStar exceptions."""


class ConfigError(PatrickStarError):
    """An option is unknown or misspelled, or its value is invalid or out of range."""


class BudgetError(PatrickStarError):
    """The memory budget of a tier is too small.

    Args:
        reason: Description of the failure.
        short_bytes: Number of missing bytes, or None if unknown.
        advice: What to try, a sentence without its period; the message ends with it.

    Attributes:
        reason, short_bytes: As passed.
        parameter: Name of a parameter that the refused operator reads, or None.
        module: Description of the module that ran, if a dry run was refused, or None.
    """

    def __init__(self, reason: str, short_bytes: int | None = None, advice: str = "") -> None:
        super().__init__(f"{reason}. {advice}" if advice else reason)
        self.reason = reason
        self.short_bytes = short_bytes
        self.parameter: str | None = None
        self.module: str | None = None


class MissingPackageError(PatrickStarError, ImportError):
    """A package that an integration needs is not installed, or too old."""


class ModelError(PatrickStarError):
    """A model or one of its parameters, named in the message, can't be managed."""


class DataError(PatrickStarError):
    """Training data is missing, empty or unreadable."""


class DeviceError(PatrickStarError):
    """The requested compute device is unknown, unsupported or not available."""


class TrainingError(PatrickStarError):
    """A training call is not possible: non-finite loss, calls out of order, or a closed engine."""


class DiskError(PatrickStarError):
    """The disk tier failed: its swap file can't be created, allocated, read or written, or a page is corrupt."""


class MoveError(PatrickStarError):
    """A transfer did not finish, because its worker thread ended or the transfer was cancelled."""


class PeerError(MoveError):
    """Another process ended, does not respond, or called a different operation."""


class CheckpointError(PatrickStarError):
    """A checkpoint can't be written, is corrupt, or does not match the model; the previous state is kept."""
