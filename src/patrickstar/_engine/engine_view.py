"""Read-only part of the engine: settings, parts, statistics, predictions and records."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar._distributed.process_group import Processes
from patrickstar._engine.core import EngineCore
from patrickstar._engine.inspection import Inspection, inspect
from patrickstar._engine.recording import Recording
from patrickstar._engine.run_log import RunLog
from patrickstar._layout.byte_size import format_size
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._step.stats import Stats
from patrickstar.config import Config
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from patrickstar._dry_run.report import DryRunReport  # imported on first use


class EngineView:
    """Properties and methods of the engine that change nothing."""

    _core: EngineCore

    @property
    def config(self) -> Config:
        """Configuration that the engine was created with."""
        return self._core.config

    @property
    def module(self) -> nn.Module:
        """The user's model, whose parameters are managed."""
        return self._core.module

    @property
    def device(self) -> torch.device:
        """Compute device."""
        return self._core.device

    @property
    def world(self) -> Processes:
        """Processes that share the model, with `rank` and `size`."""
        return self._core.world

    @property
    def data_size(self) -> int:
        """Number of distinct batches in a step: that of the processes, unless operators shard a batch over several."""
        return self._core.distribution.mesh.size

    @property
    def data_rank(self) -> int:
        """Number of the batch that this process computes, below `data_size`."""
        return self._core.distribution.mesh.batch_of[self.world.rank]

    @property
    def layout(self) -> Layout:
        """Chunk index and offset of each parameter."""
        return self._core.layout

    @property
    def stats(self) -> Stats:
        """Bytes, peaks and seconds of the last step and of all steps."""
        return self._core.stats

    @property
    def device_budget_bytes(self) -> int:
        """Budget of the device tier in bytes."""
        return self._core.device_budget_bytes

    @property
    def host_budget_bytes(self) -> int:
        """Budget of the host tier in bytes."""
        return self._core.host_budget_bytes

    def __repr__(self) -> str:
        core, config = self._core, self.config
        numel = sum(managed.numel for managed in core.shards.managed_params)
        budgets = [
            f"device {format_size(core.device_budget_bytes)}",
            f"host {format_size(core.host_budget_bytes)}",
            *([] if config.disk is None else [f"disk {config.disk.directory}"]),
        ]
        ranks = f", rank {self.world.rank} of {self.world.size}" if self.world.size > 1 else ""
        closed = "" if core.release.alive else ", closed"
        return (
            f"Engine({type(self.module).__name__}, {numel:,} parameters, {config.precision} on {core.device}, "
            f"{', '.join(budgets)}{ranks}, step {core.stats.total.steps}{closed})"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return an iterator over the model's parameters. `recurse`: include those of submodules."""
        return self.module.parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the model's parameters with their names.

        Args:
            prefix: Beginning of all names.
            recurse: Include the parameters of submodules.
        """
        return self.module.named_parameters(prefix, recurse)

    def inspect(self) -> Inspection:
        """Return a snapshot of where everything is: tiers, chunks, parameters, the last trace and the loss scale.

        It starts no transfers and waits only for calls of other threads: call it at any time, also on a closed engine.
        `stats` has statistics.
        """
        return inspect(self._core)

    def record(
        self, log: RunLog | str | Path | None = None, *, steps: int = 0, tensorboard: str | Path | None = None
    ) -> Recording:
        """Record the steps inside the returned context, for `patrickstar report`, for TensorBoard and for Perfetto.

        Each step has a record of its statistics. The first, second, fourth, eighth step and so on have a timeline, too:
        when each channel was busy, what was waited for, and where the bytes were. Beside an accelerator these steps
        wait for it at their begin and end.

        Args:
            log: File of JSON lines, which is written step by step. Default: none.
            steps: Number of steps of a log that are continued; the rest of the file is replaced.
            tensorboard: Directory for scalars of each step in TensorBoard's format. Default: none.

        Returns:
            Context with `log(loss=...)` to add to the record of a step, `timelines`, and `chrome_trace(path)`.

        Raises:
            ConfigError: A file can't be written, or TensorBoard is not installed.
            TrainingError: The engine is closed, or is being recorded.
        """
        return Recording(self._core, log, steps, tensorboard)

    def plan(self, *args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> "DryRunReport":
        """Predict the cost of a training step by a dry run. Nothing is computed; measuring the machine takes seconds.

        Gradients are clipped in it as in the last step: not at all, without effect, or with effect.

        Inside `record` the prediction becomes a part of the log, and the report compares it with the steps.

        Args:
            *args: Inputs of the model, of the shapes and dtypes to plan for.
            loss: Returns the loss from the model's output. Default: its attribute `loss`, or the output itself.
            **kwargs: Further inputs, by keyword.

        Returns:
            Report with seconds per step, bytes per tier and transferred bytes.

        Raises:
            BudgetError: Such a step would not fit.
            ConfigError: Several processes share the model.
        """
        from patrickstar._dry_run.simulation import dry_run_engine, forward_backward_step

        if self.world.size > 1:
            raise ConfigError("engine.plan simulates a single process; for several use patrickstar plan --gpus")
        if self._core.release.alive:
            with self._core.interceptor.lock, self._core.internal_computation():
                self._core.optimizer_step.finish_running()  # beside updates all that is measured is slower
        step = forward_backward_step(loss, args, kwargs, self._core.gradients.last_clips)
        report = dry_run_engine(self, step)
        if isinstance(self._core.recording, Recording):
            self._core.recording.planned(report.seconds, report.bound_s, report.stats)
        return report
