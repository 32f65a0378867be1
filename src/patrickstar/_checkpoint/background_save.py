"""The checkpoint that an engine writes while training goes on."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from patrickstar._distributed.process_group import World
from patrickstar._params.model_data import ModelData
from patrickstar.errors import CheckpointError


class BackgroundSave:
    """Waits for the checkpoint that `data.saving` writes, if there is one, and frees what it took.

    reserved_bytes: host memory that the save has reserved.
    """

    def __init__(self, data: ModelData, world: World | None) -> None:
        self.data, self.world = data, world
        self.reserved_bytes = 0

    def wait_or_raise(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises CheckpointError if it failed."""
        saving = self.data.saving
        if saving is not None:
            try:
                with explaining(self.world):
                    saving.finish()
            except KeyboardInterrupt:
                saving.cancel("it was interrupted")
                raise
            finally:
                self.data.saving = None
                self.data.manager.host_tier.release_reservation(self.reserved_bytes)

    def poll(self) -> None:
        """Take note of a checkpoint that has ended meanwhile: a failure is a warning, and training goes on."""
        saving = self.data.saving
        if saving is not None and saving.done:
            self.wait()

    def wait(self) -> bool:
        """Wait for the checkpoint that is being written; a failure is a warning. Returns whether there was none."""
        try:
            self.wait_or_raise()
        except CheckpointError as error:
            warnings.warn(f"no checkpoint was written, training goes on: {error}", stacklevel=3)
            return False
        return True

    def copy_all(self) -> None:
        """What is wanted of chunks is copied: they will change."""
        if (saving := self.data.saving) is not None:
            saving.copy_all()


@contextmanager
def explaining(world: World | None) -> Iterator[None]:
    """What PyTorch raises when another process is gone names it."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if world is None:
            raise
        raise world.explain_failure(error) from error
