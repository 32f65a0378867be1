"""A user's configuration with what the arguments of another library select."""

import torch

from patrickstar.config import Config
from patrickstar.errors import ConfigError
from patrickstar.optim import Optimizer


def check_precision(config: Config, precision: str, selects: str) -> None:
    """Raise ConfigError if the configuration sets another precision. `selects`: begin of the text, up to the verb."""
    if config.precision not in ("auto", precision):
        raise ConfigError(
            f"{selects} {precision}, and ps.Config selects {config.precision}: leave precision out of ps.Config"
        )


def merge_config(config: Config, precision: str, device: torch.device, selected: str, optimizer: Optimizer) -> Config:
    """Return the options that a configuration sets, with precision, device and optimizer.

    Args:
        config: The user's configuration.
        precision: Precision, which `check_precision` has compared.
        device: Device that the other library's arguments select.
        selected: Begin of the error's text, which says so.
        optimizer: Optimizer, in place of the configuration's.

    Returns:
        The configuration for the engine.

    Raises:
        ConfigError: The configuration sets a device of another type.
    """
    explicit = {name: getattr(config, name) for name in config.model_fields_set}
    if explicit.get("device", "auto") != "auto" and torch.device(config.device).type != device.type:
        raise ConfigError(f"{selected}, and ps.Config selects {config.device!r}: leave device out of ps.Config")
    return Config(**explicit | {"precision": precision, "device": str(device), "optimizer": optimizer})
