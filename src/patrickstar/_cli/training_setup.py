"""Configuration of a training run, from its options."""

import patrickstar as ps
from patrickstar._cli.late_updates import late_update
from patrickstar._cli.train_options import TrainOptions
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
