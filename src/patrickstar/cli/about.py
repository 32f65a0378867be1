"""What the checkpoints of a run say of it: how far it was, and what it takes to make a model of its kind again."""

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator
from torch import nn

from patrickstar.checkpoint.reader import CheckpointReader
from patrickstar.cli.data import Corpus
from patrickstar.cli.models import ModelSource
from patrickstar.cli.tokenizer import tokenizer_text
from patrickstar.engine.told import read_own
from patrickstar.errors import CheckpointError

if TYPE_CHECKING:
    from patrickstar.cli.train import TrainOptions


class About(BaseModel):
    """Plain data; from a checkpoint nothing of it is believed before it was looked at."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
    def of(cls, options: "TrainOptions", source: ModelSource, module: nn.Module, corpus: Corpus) -> "About":
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
        told = read_own(reader, 0).user.get("run")
        try:
            return cls.model_validate(told)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise CheckpointError(
                f"{reader.folder} was not written by patrickstar train, and says neither how to go on nor what model "
                f"it is of ({'.'.join(map(str, ('run', *wrong['loc'])))}: {wrong['msg']}); load it into an engine with "
                f"engine.load"
            ) from None

    def after(self, step: int) -> dict[str, Any]:
        """As a checkpoint has it."""
        return self.model_copy(update={"step": step}).model_dump()
