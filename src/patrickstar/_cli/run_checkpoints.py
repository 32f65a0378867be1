"""Checkpoints of a training run: where to save, which one to resume, and the metadata to rebuild the model."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, field_validator
from torch import nn

import patrickstar as ps
from patrickstar._checkpoint.manifest import ValidatedModel, first_error
from patrickstar._checkpoint.metadata import read_rank
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli.corpus import Corpus
from patrickstar._cli.launcher import find_agent
from patrickstar._cli.tokenizer import tokenizer_text
from patrickstar._cli.train_options import TrainOptions
from patrickstar._distributed.process_group import Processes
from patrickstar._models.model_source import ModelSource
from patrickstar.errors import CheckpointError, ConfigError

FIXED_OPTIONS = ("lr", "weight_decay")
"""Options that cannot change on resume, because the optimizer in the checkpoint stores them."""
DEFAULT_FOLDER = Path("runs/checkpoints")
DEFAULT_KEEP = 3


class RunMetadata(ValidatedModel):
    """Metadata of a run, as plain data."""

    step: NonNegativeInt = 0
    """Number of completed steps."""
    lr: float
    weight_decay: float
    architecture: str
    """Class of the model in transformers."""
    config: str
    """Configuration of the model as JSON."""
    tokenizer: str
    """Tokenizer as JSON of the tokenizers library."""
    trained: bool
    """True if the run trained the tokenizer, which then has no other files."""
    agents: list[str] = Field(default_factory=list)
    """torchrun agents that started the run's processes; see `find_agent`."""

    @field_validator("config")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        try:
            parsed = json.loads(text)
        except RecursionError:
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError("the configuration is not a JSON object")
        return text

    @classmethod
    def of(
        cls, options: TrainOptions, source: ModelSource, module: nn.Module, corpus: Corpus, agents: list[str]
    ) -> "RunMetadata":
        return cls(
            lr=options.lr,
            weight_decay=options.weight_decay,
            architecture=type(module).__name__,
            config=source.config.to_json_string(use_diff=False),
            tokenizer=tokenizer_text(corpus, source.vocabulary),
            trained=source.vocabulary.file is None,
            agents=agents,
        )

    @classmethod
    def read(cls, reader: CheckpointReader) -> "RunMetadata":
        """Read the metadata in a checkpoint. Raise CheckpointError if another program wrote it."""
        try:
            return _UserState.model_validate(read_rank(reader, 0).user).run
        except ValidationError as error:
            raise CheckpointError(
                f"{reader.folder} was not written by patrickstar train and lacks the metadata to resume or export it "
                f"({first_error(error)}); load it into an engine with engine.load"
            ) from None

    def after(self, step: int) -> dict[str, Any]:
        """Return the metadata to save after a step."""
        return self.model_copy(update={"step": step}).model_dump()


class _UserState(BaseModel):
    """User state of a checkpoint, as far as it is needed here."""

    run: RunMetadata


@dataclass(frozen=True)
class ResumeOptions:
    """Save to `checkpoints` every `every` steps; resume from `resumed`, which was saved after `step` steps."""

    every: int = 0
    checkpoints: ps.Checkpoints | None = None
    resumed: Path | None = None
    step: int = 0
    agents: list[str] = field(default_factory=list)
    """torchrun agents of all processes."""

    @classmethod
    def of(cls, options: TrainOptions, world: Processes) -> "ResumeOptions":
        """Check the options before anything is built; every process must call this.

        Processes that torchrun has restarted resume from the newest checkpoint that the run has saved, instead of the
        one that the options name.

        Raises:
            ConfigError: The options cannot be used together.
            CheckpointError: The checkpoint cannot be used.
        """
        agents = sorted({agent for agent in world.all_gather_object(find_agent()) if agent is not None})
        resumed = None if options.resume is None else newest_in(options.resume)
        folder = options.save_to or (resumed.parent if resumed is not None else _default_folder(options))
        every = options.save_every or int(options.durable)
        keep = options.keep or (1 if options.durable else DEFAULT_KEEP)
        checkpoints = ps.Checkpoints(folder, keep) if every else None
        newest = None if checkpoints is None else checkpoints.newest()
        own = world.all_gather_object(str(newest) if newest is not None and _is_saved_by(agents, newest) else None)[0]
        if own is not None:
            resumed = Path(own)
        step = 0 if resumed is None else _check_resumable(resumed, options)
        if own is None and step >= options.steps:
            raise ConfigError(
                f"{resumed} was saved after step {step}, and --steps is {options.steps}: nothing is left to do"
            )
        if checkpoints is None and options.save_to is not None:
            raise ConfigError(f"--save-to {options.save_to} requires --save-every, the number of steps")
        if newest is not None and (resumed is None or resumed.parent.resolve() != folder.resolve()):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run ({newest.name}); continue it with --resume {folder}, or "
                f"choose another folder with --save-to"
            )
        return cls(every, checkpoints, resumed, step, agents)


def _default_folder(options: TrainOptions) -> Path:
    return options.disk / "steps" if options.durable and options.disk is not None else DEFAULT_FOLDER


def _is_saved_by(agents: list[str], checkpoint: Path) -> bool:
    """Return True if one of the agents started the processes that saved a checkpoint."""
    try:
        return not set(agents).isdisjoint(RunMetadata.read(CheckpointReader(checkpoint)).agents)
    except CheckpointError:
        return False  # of another program


def _check_resumable(checkpoint: Path, options: TrainOptions) -> int:
    """Return the number of completed steps. Raise ConfigError if an option differs that cannot change."""
    metadata = RunMetadata.read(CheckpointReader(checkpoint))
    for name in FIXED_OPTIONS:
        given, saved = getattr(options, name), getattr(metadata, name)
        if given != saved:
            raise ConfigError(
                f"{checkpoint} belongs to a run with --{name.replace('_', '-')} {saved:g}, which a resumed run "
                f"keeps: {given:g} has no effect; use the same value, or start a new run from an export"
            )
    return metadata.step


def newest_in(folder: Path) -> Path:
    """Return the newest checkpoint in a folder, or the folder itself. Raise CheckpointError for an empty folder."""
    newest = ps.Checkpoints(folder).newest()
    if newest is not None:
        return newest
    if folder.is_dir() and not any(folder.iterdir()):
        raise CheckpointError(f"{folder} is empty: there is no checkpoint in it")
    return folder
