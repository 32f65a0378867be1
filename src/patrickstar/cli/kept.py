"""The checkpoints of a command line's run: where they go, which one it goes on from, and what they say of the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import patrickstar as ps
from patrickstar.checkpoint.reader import CheckpointReader
from patrickstar.cli.data import Corpus
from patrickstar.cli.models import ModelSource
from patrickstar.cli.tokenizer import tokenizer_text
from patrickstar.engine.told import read_own
from patrickstar.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from patrickstar.cli.train import TrainOptions

FIXED = ("lr", "weight_decay")
"""Options that a run keeps when it is resumed: they are the optimizer's, and a checkpoint has them."""
DEFAULT_FOLDER = Path("runs/checkpoints")


@dataclass(frozen=True)
class Kept:
    """`every` so many steps a checkpoint goes to `folder`; the run goes on from `resumed`, which was after `step`."""

    every: int = 0
    folder: ps.Checkpoints | None = None
    resumed: Path | None = None
    step: int = 0

    @classmethod
    def of(cls, options: "TrainOptions") -> "Kept":
        """What the options say. Raises ConfigError or CheckpointError, before anything is built, if that can't be."""
        resumed, step = None, 0
        if options.resume is not None:
            resumed = _newest_in(options.resume)
            run = _run_of(resumed)
            step = run["step"]
            for name in FIXED:
                if name in run and run[name] != getattr(options, name):
                    raise ConfigError(
                        f"{resumed} is of a run with --{name.replace('_', '-')} {run[name]:g}, which goes on with it: "
                        f"{getattr(options, name):g} would change nothing; begin a new run with what was exported"
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


def described(options: "TrainOptions", source: ModelSource, module: nn.Module, corpus: Corpus) -> dict[str, Any]:
    """What it takes to make a model of this kind again: its configuration, its tokenizer, whether that was trained."""
    return {
        **{name: getattr(options, name) for name in FIXED},
        "architecture": type(module).__name__,
        "config": source.config.to_json_string(use_diff=False),
        "tokenizer": tokenizer_text(corpus, source.vocabulary),
        "trained": source.vocabulary.file is None,
    }


def _newest_in(place: Path) -> Path:
    """A checkpoint, or the newest of a folder of checkpoints."""
    newest = ps.Checkpoints(place).newest()
    if newest is not None:
        return newest
    if place.is_dir() and not any(place.iterdir()):
        raise CheckpointError(f"{place} is empty: there is no checkpoint to resume from")
    return place


def _run_of(checkpoint: Path) -> dict[str, Any]:
    """What the run that wrote it said of itself, among it the step after which that was."""
    run = read_own(CheckpointReader(checkpoint), 0).user.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("step"), int):
        raise CheckpointError(f"{checkpoint} was not written by patrickstar train, so there is no run to go on with")
    return run
