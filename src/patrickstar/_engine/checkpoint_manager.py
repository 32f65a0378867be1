"""Folder with the checkpoints of one run."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar._checkpoint.atomic_dir import delete, free_name, list_checkpoints
from patrickstar._engine.engine import Engine
from patrickstar.errors import ConfigError


class Checkpoints:
    """Checkpoints of one run, in a folder of their own and named after their steps.

    Args:
        directory: Folder of the checkpoints; created by the first save.
        keep: Number of checkpoints to keep. Older ones are deleted once a newer one is complete. None keeps all.

    Raises:
        ConfigError: `keep` is less than 1.
    """

    def __init__(self, directory: str | Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep} would leave no checkpoint; use 1 or more, or None to keep all")
        self.directory = Path(directory)
        self.keep = keep

    def all(self) -> list[Path]:
        """Return the folders of all complete checkpoints, oldest first."""
        return [path for _, path in list_checkpoints(self.directory)]

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint, None if there is none."""
        return next(reversed(self.all()), None)

    def save(self, engine: Engine, step: int, state: Mapping[str, Any] | None = None, *, wait: bool = True) -> bool:
        """Write the checkpoint of a step; see `Engine.save`. Every process must call it.

        Args:
            engine: Engine to save.
            step: Number of completed steps, from which the folder is named.
            state: Further state by name; see `Engine.save`.
            wait: If False, write in the background while training continues.

        Returns:
            False if writing failed, for example because the disk is full: that is a warning, and earlier checkpoints
            are kept. Without `wait` always True; the warning is then issued in a later step.
        """
        engine.finish_saving()  # an unfinished checkpoint has not taken its name yet
        deletes = engine.world.rank == 0
        with engine._core.internal_computation():
            done = self._delete_old if deletes else None
            engine._checkpoint.start_save(free_name(self.directory, step), state or {}, done, wait=wait)
            return engine._core.background_save.wait() if wait else True

    def load(self, engine: Engine, state: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Load the newest checkpoint; see `Engine.load`. Every process must call it.

        Args:
            engine: Engine to restore.
            state: Objects to restore, by name; see `Engine.load`.

        Returns:
            The saved state as plain data; None if there is no checkpoint, and nothing has been changed.

        Raises:
            CheckpointError: The checkpoint is damaged or does not fit the engine. Nothing has been changed.
        """
        engine.finish_saving()  # it may delete the one that is the newest now
        newest = engine.world.all_gather_object(None if (path := self.newest()) is None else str(path))[0]
        return None if newest is None else engine.load(newest, state)

    def _delete_old(self) -> None:
        """Delete all but the newest `keep` checkpoints. Called when a checkpoint is complete."""
        if self.keep is None:
            return
        for path in self.all()[: -self.keep]:
            try:
                delete(path)
            except OSError as error:
                warnings.warn(f"cannot delete the old checkpoint {path}: {error.strerror}", stacklevel=2)
