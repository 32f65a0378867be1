"""What the checkpoints of a run say of it: how far it was, and what it takes to make a model of its kind again."""

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


class About(ValidatedModel):
    """Plain data."""

    step: NonNegativeInt = 0
    """The last one that is done."""
    lr: float
    weight_decay: float
    architecture: str
    """The model's class, in transformers."""
    config: str
    """The model's configuration, in JSON."""
    tokenizer: str
    """In JSON, as the tokenizers library has it."""
    trained: bool
    """Whether the tokenizer was trained by the run, and so has no other files."""

    @field_validator("config")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        try:
            found = json.loads(text)
        except RecursionError:
            found = None
        if not isinstance(found, dict):
            raise ValueError("the configuration is no JSON object")
        return text

    @classmethod
    def of(cls, options: TrainOptions, source: ModelSource, module: nn.Module, corpus: Corpus) -> "About":
        """A run that begins."""
        return cls(
            lr=options.lr,
            weight_decay=options.weight_decay,
            architecture=type(module).__name__,
            config=source.config.to_json_string(use_diff=False),
            tokenizer=tokenizer_text(corpus, source.vocabulary),
            trained=source.vocabulary.file is None,
        )

    @classmethod
    def read(cls, reader: CheckpointReader) -> "About":
        """The run that wrote a checkpoint. Raises CheckpointError if that was another program."""
        try:
            return _State.model_validate(read_rank(reader, 0).user).run
        except ValidationError as error:
            raise CheckpointError(
                f"{reader.folder} was not written by patrickstar train, and says neither how to go on nor what model "
                f"it is of ({first_error(error)}); load it into an engine with engine.load"
            ) from None

    def after(self, step: int) -> dict[str, Any]:
        """As a checkpoint has it."""
        return self.model_copy(update={"step": step}).model_dump()


class _State(BaseModel):
    """What a run gives to be kept, as far as that is of interest."""

    run: About
