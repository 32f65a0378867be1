"""Conversion of `TrainingArguments` to a `ps.Config`, and rejection of unsupported arguments."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainingArguments

from patrickstar.config import Config
from patrickstar.errors import ConfigError
from patrickstar.integrations._merged_config import check_precision, merge_config
from patrickstar.integrations._optimizers import NATIVE_OPTIMIZERS, SPEED_ONLY, ParamGroups
from patrickstar.optim import AdamW, AdamW8bit, Lion, Optimizer, ScheduleFreeAdamW, TorchOptimizer


def decay_groups(decayed: Iterable[str], weight_decay: float) -> ParamGroups:
    """Return a factory of param groups with and without weight decay. Holds names: it lives as long as the engine."""
    return partial(_groups, frozenset(decayed), weight_decay)


def _groups(decayed: frozenset[str], weight_decay: float, model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [param for name, param in trained if name not in decayed], "weight_decay": 0.0},
    ]


def refuse(args: TrainingArguments) -> None:
    """Raise ConfigError for arguments that conflict with the engine's management of the model."""
    precision = "the engine uses the precision of bf16=True or fp16=True for evaluation too"
    sharding = "the engine itself shards the model data over processes started by torchrun"
    unsupported = {
        "fsdp": (args.fsdp, sharding),
        "deepspeed": (args.deepspeed, sharding),
        "parallelism_config": (
            args.parallelism_config,
            "set model.config.distributed_config, of transformers, instead",
        ),
        "torch_compile": (args.torch_compile, "compile the model's blocks first, with block.compile()"),
        "fp16_full_eval": (args.fp16_full_eval, precision),
        "bf16_full_eval": (args.bf16_full_eval, precision),
        "save_on_each_node": (args.save_on_each_node, "all processes write to one checkpoint folder"),
    }
    for name, (value, reason) in unsupported.items():
        if value:
            raise ConfigError(f"TrainingArguments({name}={value!r}) is not supported: {reason}; remove it")
    if args.n_gpu > 1:
        raise ConfigError(
            f"there are {args.n_gpu} GPUs and one process, so transformers would copy the model to each GPU: start one "
            f"process per GPU with torchrun, or select one GPU with CUDA_VISIBLE_DEVICES"
        )


def merge(user_config: Config, args: TrainingArguments, optimizer: Optimizer) -> Config:
    """Return the user's configuration with precision and device of the arguments, and the optimizer.

    Arguments without bf16 and fp16 leave the precision to the configuration. Raises ConfigError if the configuration
    contradicts the arguments.
    """
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else user_config.precision
    check_precision(user_config, precision, "bf16 and fp16 of the arguments select")
    selected = f"the arguments select the device {str(args.device)!r} (use_cpu={args.use_cpu})"
    return merge_config(user_config, precision, args.device, selected, optimizer)


def name_of_optim(args: TrainingArguments) -> str:
    """Return the value of `args.optim`, a string or one of transformers' names."""
    return str(getattr(args.optim, "value", args.optim))


def _optim_args(args: TrainingArguments) -> dict[str, str]:
    """Return the options in `args.optim_args`, such as "r=0.5, weight_lr_power=2"."""
    pairs = (pair.partition("=") for pair in (args.optim_args or "").replace(" ", "").split(",") if pair)
    return {key: value for key, _, value in pairs}


def from_args(args: TrainingArguments, groups: ParamGroups) -> Optimizer | None:
    """Return the optimizer for a name of another library in `args.optim`, without it; None for other names.

    AdamW and Lion of bitsandbytes with states of 32 bits, and AdamW of schedulefree, have the rules of this package's.
    "paged" names the same rule, and chunks need no pages of bitsandbytes. AdamW with states of 8 bits is that of this
    package, which rounds them differently. Raises ConfigError for other names of states with fewer bits.
    """
    name = name_of_optim(args)
    betas = (args.adam_beta1, args.adam_beta2)
    if name in ("lion_32bit", "paged_lion_32bit"):
        return Lion(lr=args.learning_rate, betas=betas, param_groups=groups)
    if name == "schedule_free_adamw":
        if args.warmup_steps != int(args.warmup_steps):
            raise ConfigError(f"warmup_steps={args.warmup_steps} with optim={name!r}: give a number of steps")
        power = {key: float(value) for key, value in _optim_args(args).items() if key in ("r", "weight_lr_power")}
        options: dict[str, Any] = {"warmup_steps": int(args.warmup_steps), "param_groups": groups} | power
        return ScheduleFreeAdamW(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, **options)
    if name == "paged_adamw_32bit":
        return AdamW(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, param_groups=groups)
    if name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        return AdamW8bit(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, param_groups=groups)
    if name.endswith(("_8bit", "_4bit")):
        bits = name.removesuffix("bit").rpartition("_")[2]
        raise ConfigError(
            f"optim={name!r} is not supported: it stores states in {bits} bits, with a scale for each block of them, "
            f"and chunks have none. Use optim='adamw_8bit' (2 bytes of states per parameter), 'lion_32bit' (4 bytes) "
            f"or 'adamw_torch' (8 bytes); with ps.Config(disk=...) they may exceed the memory"
        )
    return None


def from_optim(kind: Any, options: Mapping[str, Any], groups: ParamGroups, name: str) -> Optimizer:
    """Return the optimizer for `args.optim`, given transformers' class and options for it.

    Uses AdamW, SGD and Muon of this package. Raises ConfigError for optimizers that do not update each parameter
    separately.
    """
    native = NATIVE_OPTIMIZERS.get(kind)
    used = {key: value for key, value in options.items() if key not in SPEED_ONLY}
    if native is not None and used.keys() <= native.model_fields.keys():
        return native(**used, param_groups=groups)
    return from_class(kind, options, groups, f"optim={name!r}")


def from_class(kind: Any, options: Mapping[str, Any], groups: ParamGroups, label: str) -> Optimizer:
    """Return the optimizer for a class of torch or of this package. Raises ConfigError for any other class."""
    own_groups = [key for key in ("params", "model", "optimizer_dict") if key in options]
    if isinstance(kind, type) and not own_groups:
        if issubclass(kind, Optimizer):
            return kind(**{"param_groups": groups} | dict(options))
        if kind.__module__.startswith("bitsandbytes."):
            raise ConfigError(
                f"{label} is not supported: {kind.__name__} of bitsandbytes updates tensors with kernels of its own, "
                f"and not the elements of chunks. Use a class of torch.optim, such as optim='rmsprop', or ps.AdamW, "
                f"ps.AdamW8bit, ps.SGD or ps.Lion"
            )
        wrapped = TorchOptimizer.wrapping(partial(kind, **options))
        if wrapped is not None:
            return wrapped.model_copy(update={"param_groups": groups})
    raise ConfigError(
        f"{label} is not supported: chunks require an optimizer that updates each parameter separately. Use one of "
        f"this package, such as ps.AdamW or ps.Muon, or a class of torch.optim"
    )


def from_argument(value: Any, groups: ParamGroups) -> Optimizer:
    """Return the optimizer in `optimizers=(value, None)`. Raises ConfigError for one that already has parameters."""
    optimizer: Optimizer = Config(optimizer=value).optimizer
    return optimizer if optimizer.param_groups is not None else optimizer.model_copy(update={"param_groups": groups})
