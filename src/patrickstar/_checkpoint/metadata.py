"""What a checkpoint tells in plain data, beside its tensors: of all processes together, and of each."""

from typing import Any, TypeVar

from pydantic import NonNegativeInt, ValidationError, field_validator

from patrickstar._checkpoint import json_codec
from patrickstar._checkpoint.manifest import ValidatedModel, first_error
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar.errors import CheckpointError

COMMON = "patrickstar"
"""The name of what is told of all processes together."""


def rank_key(rank: int) -> str:
    """The name of what is told of one process."""
    return f"patrickstar.rank-{rank:05d}"


_Kind = TypeVar("_Kind", bound=ValidatedModel)


class CommonMetadata(ValidatedModel):
    """Of all processes together. frozen: whether frozen parameters are there. steps, memory: by parameter name."""

    patrickstar: str
    precision: str
    frozen: bool
    optimizer: str
    states: list[str]
    groups: list[dict[str, Any]]
    steps: dict[str, NonNegativeInt]
    memory: dict[str, dict[str, Any]]
    buffers: list[str]
    loss_scale: dict[str, float]
    extra: dict[str, Any]

    @field_validator("loss_scale")
    @classmethod
    def _all_or_nothing(cls, scale: dict[str, float]) -> dict[str, float]:
        if scale and (scale.keys() != {"scale", "good_steps"} or not scale["scale"] > 0):
            raise ValueError("it is no loss scale")
        return scale

    @field_validator("groups")
    @classmethod
    def _have_parameters(cls, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for group in groups:
            if not isinstance(names := group.get("params"), list) or not all(isinstance(name, str) for name in names):
                raise ValueError("a param group has no names of parameters")
        return groups


class RankMetadata(ValidatedModel):
    """Of one process: its random generators, and what the user gave."""

    random: dict[str, Any]
    user: dict[str, Any]


def read_common(reader: CheckpointReader) -> CommonMetadata:
    """What is told of all. Raises CheckpointError if that is not what a checkpoint holds."""
    return _read(reader, COMMON, CommonMetadata)


def read_rank(reader: CheckpointReader, rank: int) -> RankMetadata:
    """The same of one process."""
    return _read(reader, rank_key(rank), RankMetadata)


def model_tensors(reader: CheckpointReader) -> dict[str, bool]:
    """The model's tensors by its own names, and whether each is a parameter, not a buffer."""
    buffers = set(read_common(reader).buffers)
    names = (name.removeprefix("model.") for name in reader.document.tensors if name.startswith("model."))
    return {name: name not in buffers for name in names}


def _read(reader: CheckpointReader, name: str, kind: type[_Kind]) -> _Kind:
    text = reader.plain(name)
    if text is None:
        raise CheckpointError(f"{reader.folder} has no {name}, so it is none of an engine")
    try:
        return kind.model_validate(json_codec.loads(text, f"{name} in {reader.folder}"))
    except ValidationError as error:
        raise CheckpointError(
            f"{name} in {reader.folder} is not what a checkpoint holds: {first_error(error)}"
        ) from error
