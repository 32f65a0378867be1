"""Folders of the Trainer's checkpoints, which appear under their name when they are complete."""

import os
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from patrickstar._checkpoint.atomic_dir import fsync_dir

PARTIAL_PREFIX = "partial-"
"""Prefix of incomplete checkpoints, which transformers does not recognize as checkpoints."""
REPLACED_SUFFIX = "-before"
"""Suffix of a checkpoint that is being replaced."""


class CheckpointFolders:
    """Folders of the checkpoints of one run, by the number of steps.

    Args:
        parent: Folder that contains them.
    """

    def __init__(self, parent: Path) -> None:
        self.parent = parent

    def partial(self, step: int) -> Path:
        """Return the folder in which a checkpoint is written."""
        return self.parent / f"{PARTIAL_PREFIX}{PREFIX_CHECKPOINT_DIR}-{step}"

    def complete(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        return self.parent / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def begin(self, step: int) -> None:
        """Create the folder in which a checkpoint is written, after what a killed run has left."""
        self._recover()
        self.partial(step).mkdir(parents=True)

    def finish(self, step: int) -> None:
        """Sync a written checkpoint to disk and rename it; replaces an older one."""
        partial, complete = self.partial(step), self.complete(step)
        for file in filter(Path.is_file, partial.iterdir()):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        fsync_dir(partial)
        replaced = partial.with_name(f"{partial.name}{REPLACED_SUFFIX}")
        if complete.is_dir():
            os.replace(complete, replaced)
        os.replace(partial, complete)
        fsync_dir(self.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _recover(self) -> None:
        """Remove incomplete checkpoints of a killed run; restore one that was being replaced."""
        for path in self.parent.glob(f"{PARTIAL_PREFIX}{PREFIX_CHECKPOINT_DIR}-*"):
            complete = self.parent / path.name.removeprefix(PARTIAL_PREFIX).removesuffix(REPLACED_SUFFIX)
            if path.name.endswith(REPLACED_SUFFIX) and not complete.exists():
                os.replace(path, complete)
            else:
                shutil.rmtree(path)
