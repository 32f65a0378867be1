"""A folder of checkpoints: the newest of them, and how many stay."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar._checkpoint.atomic_dir import complete, delete, free_name
from patrickstar._engine.engine import Engine
from patrickstar._engine.engine_checkpoint import EMPTY_STATE
from patrickstar.errors import ConfigError


class Checkpoints:
    """The checkpoints of one run, in a folder of their own, under the names of their steps.

    keep: how many stay; the oldest are deleted once a newer one is complete. None keeps all.
    """

    def __init__(self, directory: str | Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep} would leave no checkpoint; give 1 or more, or None for all")
        self.directory = Path(directory)
        self.keep = keep

    def all(self) -> list[Path]:
        """Those that are complete, the oldest first."""
        return [path for _, path in complete(self.directory)]

    def newest(self) -> Path | None:
        """The one that was written last; None if there is none."""
        return next(reversed(self.all()), None)

    def save(self, engine: Engine, step: int, state: Mapping[str, Any] = EMPTY_STATE, *, wait: bool = True) -> bool:
        """Write one for a step; see `Engine.save`. All processes have to come.

        Where the disk is full, or fails, that is a warning: what was there stays, training goes on, and it returns
        False. Without `wait` such a warning comes in a later step.
        """
        engine.finish_saving()  # or its name would not be taken yet
        first = engine.world is None or engine.world.rank == 0
        return engine._save_or_warn(free_name(self.directory, step), state, self._delete_old if first else None, wait)

    def load(self, engine: Engine, state: Mapping[str, Any] = EMPTY_STATE) -> dict[str, Any] | None:
        """Take the newest one back, and return its state; see `Engine.load`. None, and nothing changes, without one."""
        newest = engine._checkpoint.broadcast(None if (found := self.newest()) is None else str(found))
        return None if newest is None else engine.load(newest, state)

    def _delete_old(self) -> None:
        """Called when a checkpoint has become complete."""
        if self.keep is None:
            return
        for path in self.all()[: -self.keep]:
            try:
                delete(path)
            except OSError as error:
                warnings.warn(f"the old checkpoint {path} can't be deleted: {error.strerror}", stacklevel=2)
