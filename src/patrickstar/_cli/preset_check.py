"""Refusal of a preset that no memory of this machine can hold, before the libraries that build it are loaded."""

import psutil
import torch

from patrickstar._cli.train_options import TrainOptions
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar._layout.schema import schema_for
from patrickstar._models.presets import PRESETS
from patrickstar.config import Config
from patrickstar.errors import BudgetError


def refuse_too_large(options: TrainOptions) -> None:
    """Raise BudgetError if the layers of a preset exceed both the given budgets and this machine's memory.

    Models that other budgets would hold are left to the dry run, which names budgets that suffice.
    """
    preset = PRESETS.get(options.model)
    if preset is None or options.disk is not None or options.device_memory is None or options.host_memory is None:
        return
    least = "bf16" if options.precision == "auto" else options.precision  # what is chosen later takes no less
    compute = str(Config(precision=least).compute_dtype).removeprefix("torch.")
    needed = preset.layers * preset.layer_numel * schema_for(compute, trained=True).bytes_per_param
    device, host = parse_size(options.device_memory), parse_size(options.host_memory)
    machine = psutil.virtual_memory().total
    if options.device != "cpu" and torch.accelerator.is_available():
        machine += torch.accelerator.get_memory_info(0)[1]
    if needed > max(device + host, machine):
        raise BudgetError(
            f"the layers of {options.model} have {needed} bytes ({format_size(needed)}) of model data. The device "
            f"budget of {device} bytes and the host budget of {host} bytes hold {format_size(device + host)}, and this "
            f"machine has {format_size(machine)} of memory in all",
            needed - device - host,
            "Add a disk (--disk DIRECTORY), choose a smaller --model, or see `patrickstar plan` for other machines",
        )
