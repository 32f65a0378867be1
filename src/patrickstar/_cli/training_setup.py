"""Configuration of a training run, from its options."""

from typing import Literal, cast

import patrickstar as ps
from patrickstar._cli.train_options import TrainOptions
from patrickstar._step.update_log import LoggedRun
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
        update=_update(options),
        activation_checkpointing=_recomputed_share(options),
        activation_offload=options.activation_offload,
        tiled_loss=options.tiled_loss,
        tiled_mlp=options.tiled_mlp,
    )


def _recomputed_share(options: TrainOptions) -> float | Literal["products", "auto"] | None:
    share = options.checkpointing_share
    if share is None:
        return 1.0 if options.activation_checkpointing else None
    if options.activation_checkpointing:
        raise ConfigError(
            f"--checkpointing-share {share} and --activation-checkpointing, which recomputes all layers, exclude each "
            f"other"
        )
    if share in ("products", "auto"):
        return cast(Literal["products", "auto"], share)
    try:
        return float(share)
    except ValueError:
        raise ConfigError(
            f"--checkpointing-share {share!r} is neither a share of the layers nor 'products' or 'auto'"
        ) from None


def _disk(options: TrainOptions) -> ps.Disk | None:
    if options.disk is None:
        for name in ("packed", "durable"):
            if getattr(options, name):
                raise ConfigError(f"--{name} requires --disk, the directory")
        if options.disk_capacity is not None:
            raise ConfigError(f"--disk-capacity {options.disk_capacity} requires --disk, the directory")
        return None
    more = {"packed": options.packed, "durable": options.durable}
    return ps.Disk(directory=options.disk, capacity=options.disk_capacity, **more)


def _update(options: TrainOptions) -> ps.InBackward | ps.Delayed | ps.LockFree | None:
    """Return when updates are made. Raises ConfigError for options that exclude each other."""
    chosen = {
        "--in-backward": options.in_backward or None,
        "--delay-from": options.delay_from,
        "--lock-free-from": options.lock_free_from,
        "--replay": options.replay,
    }
    given = [name for name, value in chosen.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other: leave one out")
    if options.update_log is not None and given != ["--lock-free-from"]:
        raise ConfigError(f"--update-log {options.update_log} requires --lock-free-from, whose updates it records")
    if options.in_backward:
        if options.max_norm:
            raise ConfigError(
                f"--in-backward updates parameters before the norm of all gradients is known, and --max-norm is "
                f"{options.max_norm:g}: add --max-norm 0, which disables clipping, or leave --in-backward out"
            )
        if options.accumulation > 1:
            raise ConfigError(
                f"--in-backward and --accumulation {options.accumulation} exclude each other: gradients of several "
                f"batches exist all at once"
            )
        return ps.InBackward()
    if options.delay_from is not None:
        return ps.Delayed(after=options.delay_from)
    if options.replay is not None:
        log = LoggedRun(options.replay)
        last_step = max(log.last_step, log.options["after"] - 1)  # steps before need no log
        if options.steps > last_step:
            raise ConfigError(
                f"--replay {options.replay} ends with step {last_step}: use --steps {last_step} or less instead of "
                f"{options.steps}"
            )
        return ps.LockFree(replay=options.replay, **log.options)
    if options.lock_free_from is not None:
        return ps.LockFree(after=options.lock_free_from, max_staleness=options.max_staleness, log=options.update_log)
    return None
