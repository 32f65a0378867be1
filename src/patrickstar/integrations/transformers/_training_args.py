"""What `TrainingArguments` ask for, as a `ps.Config`; and what of it is refused."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from patrickstar.config import Config
from patrickstar.errors import ConfigError
from patrickstar.optim import SGD, AdamW, Optimizer, TorchOptimizer

ParamGroups = Callable[[nn.Module], Iterable[dict[str, Any]]]

OURS: dict[type, type[Optimizer]] = {torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}
"""What is used where `args.optim` names a class of torch for which there is a kernel."""
SPEED_ONLY = ("fused", "foreach")
"""Options of torch's optimizers that say how, not what, is computed."""


def decay_groups(decayed: Iterable[str], weight_decay: float) -> ParamGroups:
    """Param groups with weight decay and without; it keeps names, since it lives as long as the engine."""
    return partial(_groups, frozenset(decayed), weight_decay)


def _groups(decayed: frozenset[str], weight_decay: float, model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [param for name, param in trained if name not in decayed], "weight_decay": 0.0},
    ]


def refuse(args: TrainingArguments) -> None:
    """Raise ConfigError for arguments that ask for another way to hold the model than the engine's."""
    precision = "the engine computes all in bf16=True's or fp16=True's precision, evaluation too"
    asked = {
        "fsdp": (args.fsdp, "the engine shares the model data itself, between processes started by torchrun"),
        "deepspeed": (args.deepspeed, "the engine shares the model data itself, between processes started by torchrun"),
        "parallelism_config": (args.parallelism_config, "there is data parallelism only"),
        "torch_compile": (args.torch_compile, "compile the model's blocks before: block.compile()"),
        "fp16_full_eval": (args.fp16_full_eval, precision),
        "bf16_full_eval": (args.bf16_full_eval, precision),
        "save_on_each_node": (args.save_on_each_node, "a checkpoint is one folder that all processes can write to"),
    }
    for name, (value, why) in asked.items():
        if value:
            raise ConfigError(f"TrainingArguments({name}={value!r}) is not offered: {why}; leave it out")
    if args.n_gpu > 1:
        raise ConfigError(
            f"there are {args.n_gpu} GPUs and one process, for which transformers would copy the model to each: start "
            f"a process per GPU with torchrun, or show it one with CUDA_VISIBLE_DEVICES"
        )


def complete(given: Config, args: TrainingArguments, optimizer: Optimizer) -> Config:
    """The budgets that were given, with precision, device and optimizer as the arguments have them.

    Raises ConfigError where both say something, and differ.
    """
    said = {name: getattr(given, name) for name in given.model_fields_set}
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    if said.get("precision", precision) != precision:
        raise ConfigError(
            f"the arguments' bf16 and fp16 ask for {precision}, and ps.Config for {given.precision}: leave precision "
            f"out of ps.Config"
        )
    device = args.device
    if said.get("device", "auto") != "auto" and torch.device(given.device).type != device.type:
        raise ConfigError(
            f"the arguments have the device {str(device)!r} (use_cpu={args.use_cpu}), and ps.Config has "
            f"{given.device!r}: leave device out of ps.Config"
        )
    return Config(**said | {"precision": precision, "device": str(device), "optimizer": optimizer})


def named(kind: Any, options: Mapping[str, Any], groups: ParamGroups, name: str) -> Optimizer:
    """The optimizer that `args.optim` names, given the class and options that transformers has for it.

    AdamW and SGD are this package's. Raises ConfigError for what is not element-wise.
    """
    ours = OURS.get(kind)
    kept = {key: value for key, value in options.items() if key not in SPEED_ONLY}
    if ours is not None and kept.keys() <= ours.model_fields.keys():
        return ours(**kept, param_groups=groups)
    return of_class(kind, options, groups, f"optim={name!r}")


def of_class(kind: Any, options: Mapping[str, Any], groups: ParamGroups, what: str) -> Optimizer:
    """The optimizer of a class, torch's or this package's, with its options. Raises ConfigError for any other."""
    own_groups = [key for key in ("params", "model", "optimizer_dict") if key in options]
    if isinstance(kind, type) and not own_groups:
        if issubclass(kind, Optimizer):
            return kind(**{"param_groups": groups} | dict(options))
        if issubclass(kind, torch.optim.Optimizer):
            return TorchOptimizer(kind=kind, options=dict(options), param_groups=groups)
    raise ConfigError(
        f"{what} is not offered: chunks are updated element by element, by one rule. Use one of ps.AdamW, ps.SGD and "
        f"ps.Lion, or an element-wise class of torch.optim"
    )


def of_argument(value: Any, groups: ParamGroups) -> Optimizer:
    """The optimizer given in `optimizers=(value, None)`. Raises ConfigError for one that holds parameters already."""
    chosen: Optimizer = Config(optimizer=value).optimizer
    return chosen if chosen.param_groups is not None else chosen.model_copy(update={"param_groups": groups})
