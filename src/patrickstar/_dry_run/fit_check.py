"""Check before training whether a step fits, and find settings with which a refused step would run."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._dry_run.simulation import (
    EngineFactory,
    SimulatedKernels,
    forward_backward_step,
    kept_global_state,
    meta_model,
    on_meta,
    roofline,
    simulate,
)
from patrickstar._layout.byte_size import format_size
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.vm_pool import round_up
from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine
from patrickstar._step.tier_planning import budgets
from patrickstar.config import Config, Disk
from patrickstar.errors import BudgetError

RATE = 1e10
"""Bytes per second of all channels."""
_log = logging.getLogger(__name__)

GRAIN_BYTES = 1 << 20
"""Budgets are named in whole MiB."""
PRECISION = 16
"""Each budget that is tried is larger than the one before by 1 / PRECISION."""


@dataclass(frozen=True)
class Trial:
    """A training step that a dry run tries: a configuration, the inputs of the model, and what is changed in it."""

    config: Config
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    checkpointing: bool = False

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
        loss: Returns the loss from the model's output. Default: its attribute `loss`, the output itself if it is a
            scalar, or the sum of its floating-point tensors.
    """

    def __init__(
        self,
        make_engine: EngineFactory,
        model: Callable[[], nn.Module],
        device: torch.device,
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        self._make_engine, self._model, self._loss = make_engine, model, loss or default_loss
        self._hardware = Hardware(device)
        self.device_bytes, self.host_bytes = self._hardware.device_bytes(), self._hardware.host_bytes()
        # The rates do not matter: nothing is timed.
        self._machine = Machine(
            name="here",
            source="memory only",
            gpu=Gpu(count=1, memory=self.device_bytes, matmul_tflops=1.0, memory_bandwidth=RATE)
            if self._hardware.has_gpu
            else None,
            host=Host(memory=self.host_bytes, memory_bandwidth=RATE, cores=1, matmul_tflops=1.0),
            links=Links(h2d=RATE, d2h=RATE),
            disk=DiskDrive(capacity=1 << 60, read=RATE, write=RATE),
        )
        self.peak: str | None = None
        """Bytes and module of the peak of non-model data with enough device memory, once known."""
        self._costs = OpBenchmark(self._hardware.device, RATE, roofline(self._machine), timed=False)

    @property
    def checkpointing(self) -> str | None:
        """Method that enables the model's activation checkpointing, if it has one and it is not enabled."""
        with kept_global_state(self._hardware.device):
            return enable_checkpointing(on_meta(self._model))

    def run(self, trial: Trial) -> DryRunReport:
        """Dry-run a step. Raises BudgetError if it does not fit."""

        def build() -> nn.Module:
            model = on_meta(self._model)
            if trial.checkpointing:
                enable_checkpointing(model)
            return model

        step = forward_backward_step(self._loss, trial.args, trial.kwargs)
        library_bytes = self._hardware.library_bytes(trial.config.compute_dtype)
        with kept_global_state(self._hardware.device), torch.enable_grad():
            return simulate(
                self._make_engine, build, trial.config, step, self._machine, self._costs, library_bytes=library_bytes
            )

    def check_model_data(self, config: Config) -> int:
        """Refuse what needs no step to be refused: raise BudgetError if the model data does not fit the tiers.

        Returns:
            Bytes of the swap file, 0 if all model data will be in memory.
        """
        disk = self._machine.disk
        if config.disk is not None:
            disk = DiskDrive(
                capacity=max(1, self._hardware.free_disk_bytes(Path(config.disk.directory))), read=RATE, write=RATE
            )
        hardware = SimulatedHardware(self._machine.model_copy(update={"disk": disk}), TensorMeter())
        with kept_global_state(self._hardware.device):
            model, weights = meta_model(self._model)
            engine = self._make_engine(model, config, weights, kernels=SimulatedKernels(hardware), hardware=hardware)
        disk_tier = engine._core.manager.disk_tier
        engine.close(keep=False)
        return disk_tier.file.nbytes if disk_tier is not None else 0

    def budgets(self, config: Config) -> tuple[int, int]:
        """Return the device and host budgets of a configuration on this machine."""
        return budgets(config, self._hardware)

    def machine_may_suffice(self, config: Config, error: BudgetError) -> bool:
        """Return whether this machine has the bytes that refused model data lacks."""
        device, host = self.budgets(config)
        short = error.short_bytes or 0
        return device + short <= self.device_bytes or host + short <= self.host_bytes

    def fits(self, trial: Trial) -> bool:
        return self._try(trial) is not None

    def _try(self, trial: Trial) -> DryRunReport | None:
        try:
            return self.run(trial)
        except BudgetError:
            return None
        except Exception as error:  # the model's own code, which may not accept what the trial changes
            _log.info("a setting could not be tried: %r", error)
            return None

    def sufficient_budget(self, trial: Trial, option: str, refused_bytes: int) -> int | None:
        """Return a budget for `option` with which the trial fits; None if the machine has not it.

        A dry run with all of the machine's memory shows what a step uses. Less may do, if chunks are smaller then; the
        search stops at the first budget that fits.
        """
        device = option == "device_memory"
        limit = self.device_bytes if device else self.host_bytes
        if not self._hardware.has_gpu:  # both budgets are parts of the RAM
            other = trial.config.host_memory if device else trial.config.device_memory
            limit = limit - int(other) if other is not None else limit // 2  # as the default divides it
        ample = self._try(_with(trial, option, limit))
        if ample is None:
            return None
        if device:
            self.peak = ample.peak
        used = ample.least_device_bytes if device else max(sample.host_bytes for sample in ample.timeline)
        candidate = round_up(max(refused_bytes + 1, used), GRAIN_BYTES)
        while candidate < limit:
            if self.fits(_with(trial, option, candidate)):
                return candidate
            candidate = round_up(candidate + candidate // PRECISION, GRAIN_BYTES)
        return None


def _with(trial: Trial, option: str, value: Any) -> Trial:
    return replace(trial, config=trial.config.model_copy(update={option: value}))


def enable_checkpointing(model: nn.Module) -> str | None:
    """Enable activation checkpointing of a model of transformers.

    Returns:
        The name of the method; None if the model does not support checkpointing, or has enabled it already.
    """
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    name = next((name for name in names if hasattr(model, name)), None)
    if name is None or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    enable: Any = getattr(model, name)
    try:
        enable({"use_reentrant": False})
    except (TypeError, ValueError):  # this architecture does not support it, or has a method of another kind
        return None
    return name


def sufficient_settings(check: FitCheck, trial: Trial, device_bytes: int, host_bytes: int) -> Iterator[str]:
    """Yield settings that suffice alone for a refused trial, whose budgets are given, each verified by a dry run."""
    device = check.sufficient_budget(trial, "device_memory", device_bytes)
    if device is not None:
        yield f"device_memory='{device >> 20}MiB'"
    host = check.sufficient_budget(trial, "host_memory", host_bytes)
    if host is not None:
        yield f"host_memory='{host >> 20}MiB'"
    if trial.config.disk is None and check.fits(_with(trial, "disk", Disk("."))):
        yield "disk=ps.Disk(directory)"
    method = check.checkpointing
    if method is not None and check.fits(replace(trial, checkpointing=True)):
        yield f"activation checkpointing (model.{method}())"
    if not trial.config.activation_offload and check.fits(_with(trial, "activation_offload", True)):
        yield "activation_offload=True"
    rows = batch_of(trial)
    smaller = rows // 2 if rows is not None else 0
    while smaller:
        if check.fits(with_batch(trial, smaller)):
            yield f"a batch of {smaller} in place of {rows}"
            break
        smaller //= 2


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


def with_batch(trial: Trial, rows: int) -> Trial:
    """Return the trial with the first `rows` rows of its inputs."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:rows], (trial.args, trial.kwargs))
    return replace(trial, args=args, kwargs=kwargs)


def refusal(error: BudgetError, settings: list[str], peak: str | None = None) -> BudgetError:
    """Return the error of a refused step, with the settings that suffice, and where memory would be largest."""
    if not settings:
        advice = "No single setting on this machine was found to suffice: change the model, or several settings"
    else:
        advice = f"Each of these alone is enough, verified by dry runs: {'; '.join(settings)}"
    at_peak = f". With enough device memory, non-model data peaks at {peak}" if peak else ""
    where = f", in {error.module}" if error.module else ""
    short = f": {format_size(error.short_bytes)} are missing at one moment{where}" if error.short_bytes else where
    return BudgetError(
        f"this training step does not fit{short}. {advice}. The dry run was refused because {error.reason}{at_peak}",
        error.short_bytes,
    )
