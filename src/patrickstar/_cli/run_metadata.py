"""Metadata in the checkpoints of a run: its progress, and what is needed to rebuild the model."""

import json
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError, field_validator
from torch import nn

from patrickstar._checkpoint.manifest import ValidatedModel, first_error
from patrickstar._checkpoint.metadata import read_rank
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli.corpus import Corpus
from patrickstar._cli.model_source import ModelSource
from patrickstar._cli.tokenizer import tokenizer_text
from patrickstar._cli.train_options import TrainOptions
from patrickstar.errors import CheckpointError


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
    def of(cls, options: TrainOptions, source: ModelSource, module: nn.Module, corpus: Corpus) -> "RunMetadata":
        """Return the metadata of a new run."""
        return cls(
            lr=options.lr,
            weight_decay=options.weight_decay,
            architecture=type(module).__name__,
            config=source.config.to_json_string(use_diff=False),
            tokenizer=tokenizer_text(corpus, source.vocabulary),
            trained=source.vocabulary.file is None,
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
