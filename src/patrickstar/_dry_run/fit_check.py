"""Check before training whether a step fits, and find settings with which a refused step would run."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from patrickstar._autograd.recomputed_layers import can_recompute
from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulated_kernels import SimulatedKernels, roofline
from patrickstar._dry_run.simulation import (
    EngineFactory,
    forward_backward_step,
    kept_global_state,
    meta_model,
    on_meta,
    simulate,
)
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine, Network
from patrickstar._step.budgets import find_budgets
from patrickstar._tiers.hardware import Hardware
from patrickstar.config import Config, Disk
from patrickstar.errors import BudgetError

RATE = 1e10
"""Bytes per second of all channels."""
_log = logging.getLogger(__name__)

GRAIN_BYTES = 1 << 20
"""Budgets are named in whole MiB."""
PRECISION = 16
"""The first budget that is tried is raised by 1 / PRECISION of it, and by twice as much each further time."""
PASSES = 3
"""Passes of a step that are dry-run: the first, one that stands for those between, the last."""
AMPLE_BYTES = 1 << 60
"""Memory of the simulated machine, which limits nothing: every trial states its budgets."""


@dataclass(frozen=True)
class Trial:
    """A training step that a dry run tries: a configuration, and the inputs of the model in each of its passes."""

    config: Config
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    passes: int = 1

    @classmethod
    def of(cls, config: Config, sample: Any) -> "Trial":
        """Return the step of a sample: a tensor, a tuple of arguments, or a mapping of keyword arguments."""
        if isinstance(sample, Mapping):
            return cls(config, (), dict(sample))
        return cls(config, (sample,) if isinstance(sample, torch.Tensor) else tuple(sample), {})


class FitCheck:
    """Dry runs of one model's step on this machine; only memory is predicted.

    Args:
        make_engine: `Engine`.
        model: Builds the model on the meta device.
        hardware: This machine; after a refused step, as it was before the engine took memory.
        loss: Returns the loss from the model's output. Default: its attribute `loss`, the output itself if it is a
            scalar, or the sum of its floating-point tensors.
        processes: Number of data-parallel processes, of which one is simulated.
        replicas: Number of replicas that they form.
        sharing: Number of processes that share this machine.
    """

    def __init__(
        self,
        make_engine: EngineFactory,
        model: Callable[[], nn.Module],
        hardware: Hardware,
        loss: Callable[[Any], torch.Tensor] | None = None,
        processes: int = 1,
        replicas: int = 1,
        sharing: int = 1,
    ) -> None:
        self._processes, self._replicas, self._sharing = processes, replicas, sharing
        self._make_engine, self._model, self._loss = make_engine, model, loss or default_loss
        self._hardware = hardware
        # The rates do not matter: nothing is timed.
        self._machine = Machine(
            name="here",
            source="memory only",
            gpu=Gpu(count=sharing, memory=AMPLE_BYTES, matmul_tflops=1.0, memory_bandwidth=RATE)
            if self._hardware.has_gpu
            else None,
            host=Host(memory=AMPLE_BYTES, memory_bandwidth=RATE, cores=processes, matmul_tflops=1.0),
            links=Links(h2d=RATE, d2h=RATE, gpu_gpu=RATE),
            network=Network(bandwidth=RATE, latency_s=0.0),
            disk=DiskDrive(capacity=AMPLE_BYTES, read=RATE, write=RATE),
        )
        self._peak: str | None = None
        """Bytes and module of the peak of non-model data with enough device memory, once known."""
        self._costs = OpBenchmark(self._hardware.device, RATE, roofline(self._machine), timed=False)

    def run(self, trial: Trial) -> DryRunReport:
        """Dry-run a step with the budgets that this machine gives it. Raises BudgetError if it does not fit."""
        step = forward_backward_step(self._loss, trial.args, trial.kwargs, passes=min(trial.passes, PASSES))
        config = self._with_budgets(trial.config)
        library_bytes = self._hardware.outside_plan_bytes(
            config.compute_dtype, config.optimizer.may_multiply, int(config.device_memory or 0)
        )
        with kept_global_state(self._hardware.device), torch.enable_grad():
            return simulate(
                self._make_engine,
                partial(on_meta, self._model),
                config,
                step,
                self._machine,
                self._costs,
                library_bytes=library_bytes,
                processes=self._processes,
                replicas=self._replicas,
            )

    def check_model_data(self, config: Config) -> None:
        """Refuse what needs no step to be refused: raise BudgetError if the model data does not fit the tiers."""
        disk = self._machine.disk
        if config.disk is not None:
            disk = DiskDrive(
                capacity=max(1, self._hardware.free_disk_bytes(Path(config.disk.directory))), read=RATE, write=RATE
            )
        hardware = SimulatedHardware(self._machine.model_copy(update={"disk": disk}), TensorMeter())
        with kept_global_state(self._hardware.device):
            model, weights = meta_model(self._model)
            config = self._with_budgets(config)
            engine = self._make_engine(model, config, weights, kernels=SimulatedKernels(hardware), hardware=hardware)
        engine.close(keep=False)

    def budgets(self, config: Config) -> tuple[int, int]:
        """Return the budgets of a configuration on this machine: of each device, and of the host for all processes."""
        device, host = find_budgets(config, self._hardware, self._sharing, self._processes > 1)
        return device, host * self._sharing

    def _with_budgets(self, config: Config) -> Config:
        device, host = self.budgets(config)
        return config.model_copy(update={"device_memory": device, "host_memory": host})

    def _most_bytes(self, config: Config, option: str) -> int:
        """Return the most that this machine can give a budget: beside the other one, if that is given.

        Who states a budget may use what a default leaves free.
        """
        device = option == "device_memory"
        if self._hardware.has_gpu and device:
            return self._hardware.device_bytes(self._processes > 1)
        available = self._hardware.ram.available_bytes
        if device:
            return max(0, available - int(config.host_memory or 0)) // self._sharing
        other = 0 if self._hardware.has_gpu else int(config.device_memory or 0) * self._sharing
        return max(0, available - other)

    def machine_may_suffice(self, config: Config, error: BudgetError) -> bool:
        """Return whether this machine has the bytes that refused model data lacks."""
        short = error.short_bytes or 0
        device, host = self.budgets(config)
        levers = ("device_memory", device + short), ("host_memory", host + short * self._sharing)
        return any(nbytes <= self._most_bytes(config, option) for option, nbytes in levers)

    def explained(self, trial: Trial, error: BudgetError) -> BudgetError:
        """Return the error of a refused step with the settings that suffice, and where memory would be largest."""
        settings = list(self._sufficient_settings(trial))
        if not settings:
            advice = "No single setting on this machine was found to suffice: change the model, or several settings"
        else:
            advice = f"Each of these alone is enough, verified by dry runs: {'; '.join(settings)}"
        at_peak = f". With enough device memory, non-model data peaks at {self._peak}" if self._peak else ""
        where = f", in {error.module}" if error.module else ""
        short = where
        if error.short_bytes:
            missing = f"{format_size(error.short_bytes)} are missing{where}"
            short = f": at its first moment that does not fit, {missing}; later ones may lack more"
        reason = f"The dry run was refused because {error.reason}{at_peak}"
        return BudgetError(f"this training step does not fit{short}. {advice}. {reason}", error.short_bytes)

    def _sufficient_settings(self, trial: Trial) -> Iterator[str]:
        """Yield settings that suffice alone for a refused trial, each verified by a dry run."""
        for option, refused_bytes in zip(("device_memory", "host_memory"), self.budgets(trial.config), strict=True):
            nbytes = self._sufficient_budget(trial, option, refused_bytes)
            if nbytes is not None:
                yield f"{option}='{nbytes >> 20}MiB'"
        if trial.config.disk is None and self._fits(_with(trial, "disk", Disk("."))):
            yield "disk=ps.Disk(directory)"
        with kept_global_state(self._hardware.device):
            possible = can_recompute(on_meta(self._model))
        if possible and self._fits(_with(trial, "activation_checkpointing", 1.0)):
            yield "activation_checkpointing=True"
        for option in ("tiled_loss", "tiled_mlp"):
            if not getattr(trial.config, option) and self._fits(_with(trial, option, True)):
                yield f"{option}=True"
        if not trial.config.activation_offload and self._fits(_with(trial, "activation_offload", True)):
            yield "activation_offload=True"
        rows = batch_of(trial) or 1
        for passes in range(2, rows + 1):
            if rows % passes == 0 and self._fits(with_batch(trial, rows // passes, passes)):
                yield f"{passes} passes per step with a batch of {rows // passes} in place of {rows}"
                return
        smaller = rows // 2
        while smaller and not self._fits(with_batch(trial, smaller)):  # without a list of accumulated gradients
            smaller //= 2
        if smaller:
            yield f"a batch of {smaller} in place of {rows}"

    def _fits(self, trial: Trial) -> bool:
        return self._try(trial) is not None

    def _try(self, trial: Trial) -> DryRunReport | None:
        try:
            return self.run(trial)
        except BudgetError:
            return None
        except Exception as error:  # the model's own code, which may not accept what the trial changes
            _log.info("a setting could not be tried: %r", error)
            return None

    def _sufficient_budget(self, trial: Trial, option: str, refused_bytes: int) -> int | None:
        """Return a budget for `option` with which the trial fits; None if the machine has not it.

        The other budget is the given one, or on a CPU the default beside the budget that is tried. A dry run with all
        that this machine has, for each of two open budgets, shows what a step uses. The search goes up from there to
        the first budget that fits. Less may do, if chunks are smaller then: that is tried if nothing larger fits.
        """
        device = option == "device_memory"
        other = "host_memory" if device else "device_memory"
        most_bytes = self._most_bytes(trial.config, option)
        ample_trial = _with(trial, option, most_bytes)
        if getattr(trial.config, other) is None:
            ample_trial = _with(ample_trial, other, self._most_bytes(trial.config, other))
        ample = self._try(ample_trial)
        if ample is None:
            return None
        if device:
            self._peak = ample.peak
        on_host = max(sample.host_bytes for sample in ample.timeline) * self._sharing
        used = ample.least_device_bytes if device else on_host
        tried = _budgets_to_try(refused_bytes, max(refused_bytes + 1, used), most_bytes // GRAIN_BYTES * GRAIN_BYTES)
        return next((nbytes for nbytes in tried if self._fits(_with(trial, option, nbytes))), None)


def _budgets_to_try(refused_bytes: int, used_bytes: int, most_bytes: int) -> Iterator[int]:
    """Yield budgets in whole MiB up to `most_bytes`: from what a step used upwards, then those below it."""
    nbytes, step_bytes = round_up(used_bytes, GRAIN_BYTES), used_bytes // PRECISION
    while nbytes < most_bytes:
        yield nbytes
        nbytes, step_bytes = round_up(nbytes + max(step_bytes, 1), GRAIN_BYTES), 2 * step_bytes
    yield from [most_bytes] if most_bytes > refused_bytes else []
    lacking_bytes = min(used_bytes, most_bytes) - refused_bytes
    while (lacking_bytes := lacking_bytes // 2) >= GRAIN_BYTES:
        yield round_up(refused_bytes + lacking_bytes, GRAIN_BYTES)


def _with(trial: Trial, option: str, value: Any) -> Trial:
    return replace(trial, config=trial.config.model_copy(update={option: value}))


def default_loss(out: Any) -> torch.Tensor:
    """Return a loss of a model's output: its own, the output if it is a scalar, or the sum of its tensors."""
    loss = getattr(out, "loss", out)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


def batch_of(trial: Trial) -> int | None:
    """Return the first dimension that all input tensors share, None without one."""
    tensors = [leaf for leaf in pytree.tree_leaves((trial.args, trial.kwargs)) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else None


def with_batch(trial: Trial, rows: int, passes: int = 1) -> Trial:
    """Return the trial with the first `rows` rows of its inputs, in each of so many passes."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:rows], (trial.args, trial.kwargs))
    return replace(trial, args=args, kwargs=kwargs, passes=passes)
