"""Plain data of a checkpoint: metadata common to all processes, and per rank, with its random number generators."""

import random
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, ValidationError, field_validator

from patrickstar._checkpoint import json_codec
from patrickstar._checkpoint.manifest import ValidatedModel, first_error
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar.errors import CheckpointError
from patrickstar.optim import Optimizer, TorchOptimizer

COMMON = "patrickstar"
"""Name of the common metadata."""


def rank_key(rank: int) -> str:
    return f"patrickstar.rank-{rank:05d}"


_Model = TypeVar("_Model", bound=ValidatedModel)


class CommonMetadata(ValidatedModel):
    """Metadata common to all processes. frozen: frozen parameters are included. steps, memory: by parameter name.

    optimizer_steps: Number of steps that engines have run. batch_of: Number of the batch that each process computed, by
    rank; empty, as in checkpoints written before this field was added, if each computed a batch of its own. own: What
    an optimizer object over all parameters keeps beside their states.
    """

    patrickstar: str
    precision: str
    frozen: bool
    optimizer: str
    states: list[str]
    groups: list[dict[str, Any]]
    steps: dict[str, NonNegativeInt]
    optimizer_steps: NonNegativeInt = 0
    memory: dict[str, dict[str, Any]]
    buffers: list[str]
    loss_scale: dict[str, float]
    extra: dict[str, Any]
    batch_of: list[NonNegativeInt] = Field(default_factory=list)
    own: dict[str, Any] = Field(default_factory=dict)

    @field_validator("batch_of")
    @classmethod
    def _check_batches(cls, batches: list[int]) -> list[int]:
        if set(batches) != set(range(len(set(batches)))):
            raise ValueError("the numbers of the batches are not consecutive")
        return batches

    @field_validator("loss_scale")
    @classmethod
    def _check_loss_scale(cls, scale: dict[str, float]) -> dict[str, float]:
        if scale and (scale.keys() != {"scale", "good_steps"} or not scale["scale"] > 0):
            raise ValueError("it is not a loss scale")
        return scale

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for group in groups:
            if not isinstance(names := group.get("params"), list) or not all(isinstance(name, str) for name in names):
                raise ValueError("a param group has no parameter names")
        return groups


class RankMetadata(ValidatedModel):
    """Metadata of one rank: random number generators and the user's state."""

    random: dict[str, Any]
    user: dict[str, Any]


def read_common(reader: CheckpointReader) -> CommonMetadata:
    """Read the common metadata. Raises CheckpointError if it is missing or not valid."""
    common, processes = _read(reader, COMMON, CommonMetadata), reader.manifest.processes
    if len(common.batch_of) not in (0, processes):
        raise CheckpointError(
            f"{COMMON} in {reader.folder} is not valid checkpoint data: it has the batches of {len(common.batch_of)} "
            f"processes, and {processes} wrote the checkpoint"
        )
    return common


def precision_of(folder: Path) -> str:
    """Return the precision that a checkpoint was trained in. Raises CheckpointError if it can't be read."""
    return read_common(CheckpointReader(folder)).precision


def read_rank(reader: CheckpointReader, rank: int) -> RankMetadata:
    """Read the metadata of one rank. Raises CheckpointError if it is missing or not valid."""
    return _read(reader, rank_key(rank), RankMetadata)


def model_tensors(reader: CheckpointReader) -> dict[str, bool]:
    """Return the names of the model's tensors; the value is True for a parameter, False for a buffer."""
    buffers = set(read_common(reader).buffers)
    names = (name.removeprefix("model.") for name in reader.manifest.tensors if name.startswith("model."))
    return {name: name not in buffers for name in names}


def _read(reader: CheckpointReader, name: str, model: type[_Model]) -> _Model:
    text = reader.plain(name)
    if text is None:
        raise CheckpointError(f"{reader.folder} has no {name}: an engine did not write this checkpoint")
    try:
        return model.model_validate(json_codec.loads(text, f"{name} in {reader.folder}"))
    except ValidationError as error:
        raise CheckpointError(
            f"{name} in {reader.folder} is not valid checkpoint data: {first_error(error)}"
        ) from error


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the generator states of Python, NumPy and PyTorch (CPU and this device)."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the generators; a missing state of the device leaves its generator unchanged."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def optimizer_name(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class; of the wrapped class for a torch optimizer."""
    if isinstance(optimizer, TorchOptimizer):
        return f"{optimizer.kind.__module__}.{optimizer.kind.__qualname__}"
    return type(optimizer).__name__
