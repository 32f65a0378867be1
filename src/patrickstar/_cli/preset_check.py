"""Refusal of a preset that no memory of this machine can hold, before the libraries that build it are loaded."""

import psutil
import torch

from patrickstar._cli.presets import PRESETS
from patrickstar._cli.train_options import TrainOptions
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar.errors import BudgetError

BYTES_PER_PARAM = {"bf16": 14, "fp16": 14, "fp32": 16}
"""Model data of AdamW: the parameter, its master and two states."""


def refuse_too_large(options: TrainOptions) -> None:
    """Raise BudgetError if the layers of a preset exceed both the given budgets and this machine's memory.

    Models that other budgets would hold are left to the dry run, which names budgets that suffice.
    """
    preset = PRESETS.get(options.model)
    if preset is None or options.disk is not None or options.device_memory is None or options.host_memory is None:
        return
    needed = preset.layers * preset.layer_numel * BYTES_PER_PARAM[options.precision]
    budgets = parse_size(options.device_memory) + parse_size(options.host_memory)
    machine = psutil.virtual_memory().total
    if options.device != "cpu" and torch.cuda.is_available():
        machine += torch.cuda.get_device_properties(0).total_memory
    if needed > max(budgets, machine):
        raise BudgetError(
            f"the layers of {options.model} have {needed} bytes ({format_size(needed)}) of model data. The device "
            f"budget of {parse_size(options.device_memory)} bytes and the host budget of "
            f"{parse_size(options.host_memory)} bytes hold {format_size(budgets)}, and this machine has "
            f"{format_size(machine)} of memory in all",
            needed - budgets,
            "Add a disk (--disk DIRECTORY), choose a smaller --model, or see `patrickstar plan` for other machines",
        )
