"""Configuration, sample batch and model of a training run, from its options."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import patrickstar as ps
from patrickstar._cli.late_updates import late_update
from patrickstar._cli.model_source import ModelSource
from patrickstar._cli.train_options import TrainOptions
from patrickstar._dry_run.simulation import copy_to_meta
from patrickstar.errors import ConfigError


def training_config(options: TrainOptions) -> ps.Config:
    """Return the engine's configuration. Raise ConfigError for options that exclude each other."""
    return ps.Config(
        device=options.device,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        disk=_disk(options),
        chunk_size=options.chunk_size,
        precision=options.precision,
        optimizer=ps.AdamW(lr=options.lr, weight_decay=options.weight_decay),
        update=late_update(options),
        activation_offload=options.activation_offload,
    )


def _disk(options: TrainOptions) -> ps.Disk | None:
    if options.disk is None:
        if options.disk_capacity is not None:
            raise ConfigError(f"--disk-capacity {options.disk_capacity} requires --disk, the directory")
        return None
    return ps.Disk(directory=options.disk, capacity=options.disk_capacity)


def sample_ids(options: TrainOptions) -> torch.Tensor:
    """Return token ids of the shape of a batch."""
    return torch.zeros(options.batch, options.sequence, dtype=torch.int64, device="cpu")


def to_meta(source: ModelSource, checkpointing: bool) -> Callable[[], nn.Module]:
    """Return a function that builds the model on the meta device, without reading its weights."""
    model, _ = source.open(checkpointing)
    return partial(copy_to_meta, model) if isinstance(model, nn.Module) else model


def check_sequence(sequence: int, source: ModelSource) -> None:
    """Raise ConfigError if a sequence is longer than the positions of the model."""
    if source.max_sequence is not None and sequence > source.max_sequence:
        raise ConfigError(
            f"the model {source.name} has positions for {source.max_sequence} tokens; use --sequence "
            f"{source.max_sequence} or less instead of {sequence}"
        )
