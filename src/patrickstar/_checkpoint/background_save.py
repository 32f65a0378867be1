"""Handle of the save in progress. Does not import torch.distributed.checkpoint."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from patrickstar._distributed.process_group import Processes, explain_peer_failure
from patrickstar._params.local_shards import LocalShards
from patrickstar.errors import CheckpointError

if TYPE_CHECKING:
    from patrickstar._checkpoint.async_save import AsyncSave


class BackgroundSave:
    """Save in progress, if there is one; waits for it, and releases its host memory.

    reserved_bytes: host memory reserved for the save.
    """

    def __init__(self, data: LocalShards, world: Processes) -> None:
        self.data, self.world = data, world
        self.saving: AsyncSave | None = None
        self.start: Callable[[], None] | None = None
        """Starts a save that waits for updates to end. See [Note: saving beside training]."""
        self.reserved_bytes = 0

    def begin(self) -> None:
        """Start the save that waits for updates to end, if there is one: what it saves is about to change."""
        if (start := self.start) is not None:
            self.start = None
            self.data.reads.clear()
            start()

    def wait_or_raise(self) -> None:
        """Wait for the save in progress, if any. Raises CheckpointError if it failed."""
        self.begin()
        if (saving := self.saving) is not None:
            try:
                with explain_peer_failure(self.world):
                    saving.finish()
            except KeyboardInterrupt:
                saving.cancel("it was interrupted")
                raise
            finally:
                self.saving = None
                self.data.manager.host_tier.release_reservation(self.reserved_bytes)

    def poll(self) -> None:
        """Finish a save that has ended; a failure is a warning, and training continues."""
        self.begin()
        if (saving := self.saving) is not None and saving.done:
            self.wait()

    def wait(self) -> bool:
        """Wait for the save in progress; warn if it failed. Return False if it failed."""
        try:
            self.wait_or_raise()
        except CheckpointError as error:
            warnings.warn(f"no checkpoint was written, training continues: {error}", stacklevel=3)
            return False
        return True

    def copy_all(self) -> None:
        """Copy everything that the save in progress still needs from chunks."""
        self.begin()
        if self.saving is not None:
            self.saving.copy_all()
