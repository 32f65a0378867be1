"""Models as dry runs train them: language models by name or file, and modules with a sample batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from patrickstar._autograd.recomputed_layers import can_recompute
from patrickstar._dry_run.fit_check import Trial, batch_of, default_loss
from patrickstar._dry_run.measured_machine import MeasuredMachine
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import (
    Step,
    copy_to_meta,
    forward_backward_step,
    on_meta,
    simulate,
    simulate_on_this_machine,
)
from patrickstar._dry_run.traced_workload import traced_workloads
from patrickstar._engine.engine import Engine
from patrickstar._layout.schema import COMPUTE_DTYPES
from patrickstar._models.adapted import adapted
from patrickstar._models.model_source import ModelSource
from patrickstar._models.training_step import training_step
from patrickstar._perf_model.adapters import Adapters
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.perf_model import Estimate
from patrickstar._perf_model.tiling import NOT_TILED, Tiling
from patrickstar._perf_model.transformer_shape import Checkpointing
from patrickstar._perf_model.workload import RECOMPUTED, Workload, option_of
from patrickstar.config import Config, Disk
from patrickstar.errors import ConfigError

MAX_NORM = 1.0
"""Norm to which a language model's gradients are clipped, as in most training loops."""

Build = Callable[[], nn.Module]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class TracedModel:
    """Model that dry runs train.

    Attributes:
        build: Builds the model; called on the meta device.
        step: Returns a training step over a batch of the given number of sequences.
        row_tokens: Tokens of a sequence.
        name: Name of the model.
        checkpointing: Shares of the layers that can be recomputed.
        tiling: What is computed by tiles of tokens.
    """

    build: Build
    step: Callable[[int], Step]
    row_tokens: int
    name: str
    checkpointing: tuple[float, ...] = RECOMPUTED
    tiling: Tiling = NOT_TILED

    def workloads(self, machine: Machine) -> Callable[[int, Checkpointing], Workload]:
        """Return the workload of a step as a function of batch and checkpointing, traced on first use."""
        return traced_workloads(
            Engine, self.build, self.step, lambda batch: batch * self.row_tokens, machine, self.tiling
        )

    def dry_run(self, machine: Machine, best: Estimate) -> DryRunReport:
        """Dry-run a step of an estimate's batch and processes on a machine; on this machine its operators are timed.

        Raises:
            BudgetError: The engine does not fit this step.
        """
        work = best.workload
        disk = None if machine.disk is None else Disk(".")
        device = "cpu" if machine.gpu is None else "auto"
        config = Config(
            device=device,
            precision=machine.precision,
            disk=disk,
            activation_checkpointing=option_of(work.checkpointing) or None,
            activation_offload=work.offloaded,
            **self.tiling._asdict(),
        )
        build, step = self.build, self.step(work.batch)
        if machine.measured:
            found = config.find_device()
            return simulate_on_this_machine(
                Engine, build, config, step, found, MeasuredMachine(found, machine), best.processes
            )
        return simulate(Engine, build, config, step, machine, processes=best.processes)


def language_model(
    source: ModelSource,
    sequence: int,
    adapters: Adapters | None = None,
    precision: str = "bf16",
    tiling: Tiling = NOT_TILED,
) -> TracedModel:
    """Return a language model over sequences of that many tokens, in encoder and decoder if it has both.

    Args:
        adapters: Adapters to train beside a frozen base in `precision`. Default: the model itself is trained.
        precision: Precision of products.
        tiling: What is computed by tiles of tokens.
    """

    @cache
    def made() -> Build:
        base = source.to_meta()
        return base if adapters is None else adapted(base, adapters, getattr(torch, COMPUTE_DTYPES[precision]))

    def step(batch: int) -> Step:
        ids = torch.zeros(batch, sequence, dtype=torch.int64, device="cpu")
        return training_step({"input_ids": ids, "labels": ids}, max_norm=MAX_NORM)

    name = source.name if adapters is None else f"{source.name} with {adapters}"
    return TracedModel(lambda: made()(), step, sequence, name, tiling=tiling)


def sampled_model(
    model: nn.Module | Build, sample: Any, loss: Loss | None = None, tiling: Tiling = NOT_TILED
) -> TracedModel:
    """Return a model of the user with inputs as in training.

    Args:
        model: A module, or a function that builds it.
        sample: A tensor, a tuple of arguments, or a mapping of keyword arguments; its rows are the sequences.
        loss: Returns the loss from the model's output. Default: that of `ps.initialize`.
        tiling: What is computed by tiles of tokens.

    Raises:
        ConfigError: The inputs have no common first dimension.
    """
    trial = Trial.of(Config(), sample)
    rows = batch_of(trial)
    if not rows:
        raise ConfigError("the tensors of `sample` have no common first dimension, so that its sequences are unknown")

    def build() -> nn.Module:
        return copy_to_meta(model) if isinstance(model, nn.Module) else on_meta(model)

    def step(batch: int) -> Step:
        indices = torch.arange(batch, device="cpu") % rows
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda each: each[indices], (trial.args, trial.kwargs))
        return forward_backward_step(loss or default_loss, args, kwargs)

    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "a model")
    supported = RECOMPUTED if can_recompute(build()) else (0.0,)
    return TracedModel(build, step, _row_tokens(trial), name, supported, tiling)


def _row_tokens(trial: Trial) -> int:
    """Return the number of tokens of a sequence: of the first tensor of integers, or 1 for other inputs."""
    tensors = [leaf for leaf in pytree.tree_leaves((trial.args, trial.kwargs)) if isinstance(leaf, torch.Tensor)]
    tokens = next((each for each in tensors if not each.dtype.is_floating_point and each.dim() > 1), None)
    return 1 if tokens is None else tokens[0].numel()
