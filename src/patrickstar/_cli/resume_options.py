"""The checkpoints of a command line's run: where they go, and which one it goes on from."""

from dataclasses import dataclass
from pathlib import Path

import patrickstar as ps
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli.run_metadata import About
from patrickstar._cli.train_options import TrainOptions
from patrickstar.errors import CheckpointError, ConfigError

FIXED = ("lr", "weight_decay")
"""Options that a run keeps when it is resumed: they are the optimizer's, and a checkpoint has them."""
DEFAULT_FOLDER = Path("runs/checkpoints")


@dataclass(frozen=True)
class ResumeOptions:
    """`every` so many steps a checkpoint goes to `folder`; the run goes on from `resumed`, which was after `step`."""

    every: int = 0
    folder: ps.Checkpoints | None = None
    resumed: Path | None = None
    step: int = 0

    @classmethod
    def of(cls, options: TrainOptions) -> "ResumeOptions":
        """What the options say. Raises ConfigError or CheckpointError, before anything is built, if that can't be."""
        resumed, step = None, 0
        if options.resume is not None:
            resumed = newest_in(options.resume)
            about = About.read(CheckpointReader(resumed))
            step = about.step
            for name in FIXED:
                given, kept = getattr(options, name), getattr(about, name)
                if given != kept:
                    raise ConfigError(
                        f"{resumed} is of a run with --{name.replace('_', '-')} {kept:g}, which goes on with it: "
                        f"{given:g} would change nothing; begin a new run with what was exported"
                    )
            if step >= options.steps:
                raise ConfigError(
                    f"{resumed} is of step {step}, and --steps is {options.steps}: nothing is left to do; give more"
                )
        if not options.save_every:
            if options.save_to is not None:
                raise ConfigError(f"--save-to {options.save_to} is given without --save-every, the number of steps")
            return cls(resumed=resumed, step=step)
        folder = options.save_to or (resumed.parent if resumed is not None else DEFAULT_FOLDER)
        checkpoints = ps.Checkpoints(folder, options.keep)
        there = checkpoints.newest()
        if there is not None and (resumed is None or resumed.parent.resolve() != folder.resolve()):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run ({there.name}); go on with it by --resume {folder}, or "
                f"give another folder with --save-to"
            )
        return cls(options.save_every, checkpoints, resumed, step)


def newest_in(place: Path) -> Path:
    """The newest of a folder of checkpoints, or what may be one itself. Raises CheckpointError for an empty folder."""
    newest = ps.Checkpoints(place).newest()
    if newest is not None:
        return newest
    if place.is_dir() and not any(place.iterdir()):
        raise CheckpointError(f"{place} is empty: there is no checkpoint in it")
    return place
