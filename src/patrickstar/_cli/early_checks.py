"""Checks of commands before PyTorch is loaded, which takes seconds."""

import tempfile
from pathlib import Path

import psutil

from patrickstar._cli.corpus import refuse_missing_text
from patrickstar._cli.launcher import find_agent
from patrickstar._cli.train_options import TrainOptions
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar._layout.schema import COMPUTE_DTYPES, schema_for
from patrickstar._models.model_names import refuse_unknown_model
from patrickstar._models.presets import PRESETS
from patrickstar.errors import BudgetError, CheckpointError, ConfigError

_SIZES = ("device_memory", "host_memory", "disk_capacity", "chunk_size")
_FOLDERS = ("disk", "save_to", "tensorboard")


def refuse_early(options: TrainOptions) -> None:
    """Check names, paths and sizes.

    Raises:
        ConfigError: A size can't be read, or a folder can't be written.
        ModelError: The model is not known.
        DataError: A text file or folder is missing.
        CheckpointError: The checkpoint is missing.
    """
    for name in _SIZES:
        value = getattr(options, name)
        if value not in (None, "auto"):
            try:
                parse_size(value)
            except ConfigError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    refuse_unknown_model(options.model)
    for location in options.data:
        refuse_missing_text(location)
    if options.resume is not None and find_agent() is None:  # a restarted command resumes a newer one
        refuse_missing_checkpoint(options.resume)
    for name in _FOLDERS:
        if (folder := getattr(options, name)) is not None:
            refuse_unwritable(folder, f"--{name.replace('_', '-')}")


def refuse_unwritable(folder: Path, option: str) -> None:
    """Raise ConfigError if no file can be written to a folder, or to the one in which it would be created."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        raise ConfigError(f"{option}: {existing} can't be written: {error.strerror}; choose another folder") from error


def refuse_missing_checkpoint(path: Path) -> None:
    """Raise CheckpointError if there is nothing at the path of a checkpoint."""
    if not path.exists():
        raise CheckpointError(f"{path} is not a PatrickStar checkpoint: there is no such folder")


def refuse_too_large(options: TrainOptions) -> None:
    """Raise BudgetError if the layers of a preset exceed both the given budgets and this machine's memory.

    Models that other budgets would hold are left to the dry run, which names budgets that suffice.
    """
    preset = PRESETS.get(options.model)
    if preset is None or options.disk is not None or options.device_memory is None or options.host_memory is None:
        return
    least = "bf16" if options.precision == "auto" else options.precision  # what is chosen later takes no less
    needed = preset.layers * preset.layer_numel * schema_for(COMPUTE_DTYPES[least], trained=True).bytes_per_param
    device, host = parse_size(options.device_memory), parse_size(options.host_memory)
    machine = psutil.virtual_memory().total
    if needed <= max(device + host, machine):
        return
    if options.device != "cpu":
        import torch

        machine += torch.accelerator.get_memory_info(0)[1] if torch.accelerator.is_available() else 0
    if needed > machine:
        raise BudgetError(
            f"the layers of {options.model} have {needed} bytes ({format_size(needed)}) of model data. The device "
            f"budget of {device} bytes and the host budget of {host} bytes hold {format_size(device + host)}, and this "
            f"machine has {format_size(machine)} of memory in all",
            needed - device - host,
            "Add a disk (--disk DIRECTORY), choose a smaller --model, or see `patrickstar plan` for other machines",
        )
