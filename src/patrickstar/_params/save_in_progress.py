"""Checkpoint that is written while training continues, as the training thread sees it."""

from typing import Protocol


class SaveInProgress(Protocol):
    """A checkpoint that is written while training continues (`_checkpoint/async_save.py`)."""

    @property
    def done(self) -> bool:
        """True if the checkpoint is complete or has failed."""

    def before_update(self, index: int) -> None:
        """Copy the parts of a chunk that the checkpoint still needs, before the chunk changes."""

    def copy_all(self) -> None:
        """Copy everything that the checkpoint still needs from chunks."""

    def progress(self) -> None:
        """Copy as much as the disk accepts without waiting."""

    def finish(self) -> None:
        """Wait until the checkpoint is complete. Raises CheckpointError if it failed."""

    def cancel(self, reason: str, /) -> None:
        """Stop reading chunks and discard the checkpoint."""
