"""Checkpoint options of a training run: where to save, and which checkpoint to resume."""

from dataclasses import dataclass
from pathlib import Path

import patrickstar as ps
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli.run_metadata import RunMetadata
from patrickstar._cli.train_options import TrainOptions
from patrickstar.errors import CheckpointError, ConfigError

FIXED_OPTIONS = ("lr", "weight_decay")
"""Options that cannot change on resume, because the optimizer in the checkpoint stores them."""
DEFAULT_FOLDER = Path("runs/checkpoints")


@dataclass(frozen=True)
class ResumeOptions:
    """Save to `checkpoints` every `every` steps; resume from `resumed`, which was saved after `step` steps."""

    every: int = 0
    checkpoints: ps.Checkpoints | None = None
    resumed: Path | None = None
    step: int = 0

    @classmethod
    def of(cls, options: TrainOptions) -> "ResumeOptions":
        """Check the options before anything is built. Raise ConfigError or CheckpointError if they cannot be used."""
        resumed, step = None, 0
        if options.resume is not None:
            resumed = newest_in(options.resume)
            metadata = RunMetadata.read(CheckpointReader(resumed))
            step = metadata.step
            for name in FIXED_OPTIONS:
                given, saved = getattr(options, name), getattr(metadata, name)
                if given != saved:
                    raise ConfigError(
                        f"{resumed} belongs to a run with --{name.replace('_', '-')} {saved:g}, which a resumed run "
                        f"keeps: {given:g} has no effect; use the same value, or start a new run from an export"
                    )
            if step >= options.steps:
                raise ConfigError(
                    f"{resumed} was saved after step {step}, and --steps is {options.steps}: nothing is left to do"
                )
        if not options.save_every:
            if options.save_to is not None:
                raise ConfigError(f"--save-to {options.save_to} requires --save-every, the number of steps")
            return cls(resumed=resumed, step=step)
        folder = options.save_to or (resumed.parent if resumed is not None else DEFAULT_FOLDER)
        checkpoints = ps.Checkpoints(folder, options.keep)
        newest = checkpoints.newest()
        if newest is not None and (resumed is None or resumed.parent.resolve() != folder.resolve()):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run ({newest.name}); continue it with --resume {folder}, or "
                f"choose another folder with --save-to"
            )
        return cls(options.save_every, checkpoints, resumed, step)


def newest_in(folder: Path) -> Path:
    """Return the newest checkpoint in a folder, or the folder itself. Raise CheckpointError for an empty folder."""
    newest = ps.Checkpoints(folder).newest()
    if newest is not None:
        return newest
    if folder.is_dir() and not any(folder.iterdir()):
        raise CheckpointError(f"{folder} is empty: there is no checkpoint in it")
    return folder
