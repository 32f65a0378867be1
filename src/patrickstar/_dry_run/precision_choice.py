"""Choice of the precision of an engine whose configuration leaves it open, and a warning about a slow one."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from patrickstar._distributed.process_group import Processes
from patrickstar._distributed.single_process import SINGLE_PROCESS
from patrickstar._dry_run.product_rates import TYPICAL_WIDTH, product_rate
from patrickstar._perf_model.cpu_precision import faster_on_cpu, gflops
from patrickstar._tiers.hardware import Hardware
from patrickstar.config import Config

_log = logging.getLogger(__name__)

# [Note: choice of a precision]
# `precision="auto"` becomes a precision in `settle_precision` alone, before anything asks for bytes: memory that is
# checked, the layout, the reference of exactness checks. From then on it is a precision like any other; checkpoints and
# logs have it. On a CPU the three products of a linear layer are timed in bf16 and fp32, at the widths that most of the
# model's weights have. bf16 is the choice unless fp32 is faster by more than the memory that bf16 saves: 14 in place of
# 16 bytes per parameter. That is also more than the rates of two runs differ by, so that a choice is stable.

SLOW_RATIO = 10
"""A precision that is slower than fp32 by this ratio draws a warning."""


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, and why it was chosen."""

    precision: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.precision}, since {self.reason}"


def settle_precision(
    config: Config,
    model: nn.Module | Callable[[], nn.Module] | None,
    device: torch.device,
    world: Processes = SINGLE_PROCESS,
    say: Callable[[PrecisionChoice], None] | None = None,
) -> Config:
    """Return the configuration with a precision in place of "auto". See [Note: choice of a precision].

    Args:
        config: Configuration. If it names a precision, it is returned.
        model: Model, or function that builds it; None if it is not known.
        device: Compute device of this process.
        world: Processes that train together; all of them must call this, and all get the same precision.
        say: Called with the choice. Default: it is logged, as a warning if it is not bf16.

    Raises:
        ConfigError: Another option excludes the precision, or processes ask for different ones.
    """
    world.check_agreement({"precision": config.precision})
    if config.precision != "auto":
        return config
    # A CPU is measured by one process, while the others wait and take no cores from it.
    own = _choose(model, device) if world.rank == 0 or device.type != "cpu" else None
    gathered = world.all_gather_object(None if own is None else asdict(own))
    choices = [PrecisionChoice(**each) for each in gathered if each is not None]
    chosen = next((choice for choice in choices if choice.precision == "fp16"), choices[0])
    if world.rank == 0:
        (say or _log_choice)(chosen)
    return config.with_precision(chosen.precision)


def warn_of_slow_precision(config: Config, model: nn.Module, device: torch.device) -> None:
    """Warn if the precision that was asked for is much slower on this CPU than fp32."""
    if device.type != "cpu" or "precision" not in config.model_fields_set or config.precision == "fp32":
        return
    outputs, inputs = linear_widths(model)
    asked, fp32 = (product_rate(name, outputs, inputs) for name in (config.precision, "fp32"))
    if fp32 >= SLOW_RATIO * asked:
        warnings.warn(
            f"precision={config.precision!r} is slow here: a core computes the products of a layer of {inputs:,} to "
            f"{outputs:,} at {gflops(asked)} in {config.precision} and at {gflops(fp32)} in fp32, "
            f"{fp32 / asked:.0f} times faster. Use fp32, with 16 in place of 14 bytes per parameter, or 'auto', which "
            f"takes the faster of bf16 and fp32",
            stacklevel=5,  # the caller of `initialize`
        )


def linear_widths(model: nn.Module) -> tuple[int, int]:
    """Return the widths of output and input of the products that most of a model's weights take part in."""
    looked_up = {param for each in model.modules() if isinstance(each, nn.Embedding) for param in each.parameters()}
    numels: Counter[tuple[int, int]] = Counter()
    for param in model.parameters():
        if param.dim() > 1 and param.numel() and param.is_floating_point() and param not in looked_up:
            numels[param.shape[0], param.numel() // param.shape[0]] += param.numel()
    if not numels:
        return TYPICAL_WIDTH, TYPICAL_WIDTH
    return max(numels, key=lambda widths: (numels[widths], widths))


def _choose(model: nn.Module | Callable[[], nn.Module] | None, device: torch.device) -> PrecisionChoice:
    accelerator = Hardware.new_accelerator(device)
    if accelerator is not None:
        if accelerator.has_bf16:
            return PrecisionChoice("bf16", f"{accelerator.name} has it")
        return PrecisionChoice("fp16", f"{accelerator.name} has no bf16")
    module = _described(model, device)
    if module is not None and len({p.dtype for p in module.parameters() if p.is_floating_point()}) > 1:
        return PrecisionChoice("bf16", "the model mixes dtypes and keeps them; only inputs are cast")
    widths = (TYPICAL_WIDTH,) * 2 if module is None else linear_widths(module)
    bf16, fp32 = (product_rate(name, *widths) for name in ("bf16", "fp32"))
    reason = (
        f"a core computes the products of a layer of {widths[1]:,} to {widths[0]:,} at {gflops(bf16)} in bf16 and at "
        f"{gflops(fp32)} in fp32"
    )
    return PrecisionChoice(faster_on_cpu(bf16, fp32), reason)


def _described(model: nn.Module | Callable[[], nn.Module] | None, device: torch.device) -> nn.Module | None:
    """Return the model, built on the meta device if it is a function; None if it can't be built there."""
    if model is None or isinstance(model, nn.Module):
        return model
    # Imported here: it would add to `import patrickstar`.
    from patrickstar._dry_run.simulation import kept_global_state, on_meta

    try:
        with kept_global_state(device):
            return on_meta(model)
    except Exception as error:  # the model's own code, which may do anything
        _log.info("the widths of the model are unknown, since it can't be built on the meta device: %r", error)
        return None


def _log_choice(choice: PrecisionChoice) -> None:
    # Python shows warnings of loggers by default, and no information. bf16 is what most expect.
    _log.log(logging.INFO if choice.precision == "bf16" else logging.WARNING, "%s", choice)
