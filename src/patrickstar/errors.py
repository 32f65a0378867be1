"""What can go wrong, by cause. Every message says what happened, to what, how many bytes, and what to try."""


class PatrickStarError(Exception):
    """The root of every error this package raises on purpose."""


class ConfigError(PatrickStarError):
    """An option is unknown, misspelt or out of range."""


class BudgetError(PatrickStarError):
    """A tier's budget in bytes is too small for what has to lie there; `short_bytes` says by how much, if known."""

    def __init__(self, message: str, short_bytes: int | None = None) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class ModelError(PatrickStarError):
    """A model, or one of its parameters, can't be managed; the message names it."""


class DataError(PatrickStarError):
    """Training data is missing, empty or unreadable."""


class DeviceError(PatrickStarError):
    """The compute device asked for is not there."""


class TrainingError(PatrickStarError):
    """Training can't go on: a loss that is not finite, a step out of order, an engine that was closed."""


class DiskError(PatrickStarError):
    """The disk tier failed: its file can't be made, reserved, read or written, or a page came back damaged."""


class MoveError(PatrickStarError):
    """A thread that moves bytes ended, or its transfer was cancelled, before the bytes had moved."""


class PeerError(MoveError):
    """Another process has ended, fails to answer, or does not do as the others do."""


class CheckpointError(PatrickStarError):
    """A checkpoint can't be written, is damaged, or does not fit the model; what was there before is as it was."""
