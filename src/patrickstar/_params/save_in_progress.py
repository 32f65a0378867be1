"""What model data need of a checkpoint that is being written."""

from typing import Protocol


class SaveInProgress(Protocol):
    """A checkpoint that is written while training continues (`_checkpoint/async_save.py`)."""

    @property
    def done(self) -> bool:
        """Return whether it is complete or has failed."""
        ...

    def before_update(self, index: int) -> None:
        """Copy what the checkpoint still needs of a chunk, which is about to change."""
        ...

    def copy_all(self) -> None:
        """Copy what the checkpoint still needs of all chunks."""
        ...

    def progress(self) -> None:
        """Copy as much as the disk accepts without waiting."""
        ...

    def finish(self) -> None:
        """Wait until it is complete. Raises CheckpointError if it failed."""
        ...

    def cancel(self, why: str) -> None:
        """Stop reading chunks and discard the checkpoint."""
        ...
