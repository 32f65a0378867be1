"""Recording of an engine's steps: statistics of each, and timelines of some."""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from patrickstar._engine.chrome_trace import write_chrome_trace
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine_call import engine_call
from patrickstar._engine.run_log import RunLog, StepRecord, describe
from patrickstar._engine.tensorboard_log import TensorBoardLog, scalars_of
from patrickstar._schedule.step_timeline import StepTimeline
from patrickstar._step.stats import StepStats
from patrickstar.errors import TrainingError


def doubles(step: int) -> bool:
    """Return whether a step is the first, second, fourth, and so on: a long run has few such steps."""
    return step & (step - 1) == 0


class Recording:
    """Recording of the steps of an engine, while its context is open. See `Engine.record`.

    Attributes:
        timelines: Timelines of the recorded steps, in order.
    """

    def __init__(
        self,
        core: EngineCore,
        optimizer: ChunkOptimizer,
        log: RunLog | str | Path | None,
        steps: int,
        tensorboard: str | Path | None = None,
    ) -> None:
        self._core, self._optimizer = core, optimizer
        self._tensorboard = None if tensorboard is None else TensorBoardLog(tensorboard, steps)
        self._scalars = scalars_of(core)
        self._log = log if isinstance(log, RunLog) else RunLog(log, steps)
        self._owns_log = not isinstance(log, RunLog)
        self._before = steps
        self._steps = 0
        """Steps since the recording began."""
        self._ended_s = 0.0
        self._record: StepRecord | None = None
        """Record of the last step, until it is written."""
        self.timelines: list[StepTimeline] = []

    def __enter__(self) -> Self:
        self._core.check_open()
        if self._core.recording is not None:
            raise TrainingError("this engine is being recorded already: leave the first engine.record() before")
        self._core.recording = self
        self._log.write_run(describe(self._core))
        self._ended_s = self._core.manager.hardware.seconds()
        self._end_step_hook = self._optimizer.register_step_post_hook(self._end_step)
        self._begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_step_hook.remove()
        self._write()
        self._core.recording = self._core.kernels.timeline = None
        self._core.manager.end_timeline(0)
        if self._owns_log:
            self._log.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _begin_step(self) -> None:
        if doubles(self._steps + 1):
            self._core.manager.begin_timeline()
            self._core.kernels.timeline = self._core.manager.timeline

    @engine_call
    def _end_step(self, *_: Any) -> None:
        """End the record of a step: a hook of the optimizer's `step`."""
        self._write()
        self._steps += 1
        self._core.kernels.timeline = None
        number, now = self._before + self._steps, self._core.manager.hardware.seconds()
        timeline = self._core.manager.end_timeline(number)
        if timeline is not None:
            self.timelines.append(timeline)
            self._log.write_timeline(timeline)
        self._record, self._ended_s = StepRecord(number, now - self._ended_s, self._core.stats.last), now
        self._begin_step()

    def log(
        self,
        *,
        loss: float | None = None,
        learning_rate: float | None = None,
        gradient_norm: float | None = None,
        tokens: int | None = None,
        elapsed_s: float | None = None,
    ) -> StepRecord:
        """Add what the engine does not know to the record of the last step, and write it.

        Args:
            loss: Loss of the step.
            learning_rate: Its learning rate.
            gradient_norm: Global norm of its gradients before clipping.
            tokens: Its number of tokens, in all processes.
            elapsed_s: Its seconds. Default: those since the step before, which contain whatever the loop did.

        Returns:
            The record. The next step writes it without these values if this is not called.

        Raises:
            TrainingError: There has been no step since the last call.
        """
        if self._record is None:
            raise TrainingError("there is no step to log: call recording.log() after optimizer.step(), once per step")
        record = replace(
            self._record,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens=tokens,
            elapsed_s=self._record.elapsed_s if elapsed_s is None else elapsed_s,
        )
        self._record = record
        self._write()
        return record

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step, as long as it is not written: `log` and the next step write it."""
        return self._record

    def planned(self, seconds: float, bound_s: float, stats: StepStats) -> None:
        """Add the prediction of a dry run to the log; see `RunLog.write_plan`. `Engine.plan` calls this."""
        self._log.write_plan(seconds, bound_s, stats)

    def _write(self) -> None:
        if self._record is not None:
            self._log.write_step(self._record)
            if self._tensorboard is not None:
                self._tensorboard.write_step(self._record, self._scalars)
        self._record = None

    def chrome_trace(self, path: str | Path, profile: str | Path | None = None) -> None:
        """Write the timelines as a trace for Perfetto or chrome://tracing.

        Args:
            path: JSON file to write.
            profile: Trace of `torch.profiler` (`export_chrome_trace`) of the same process, whose content is written,
                too, on the same time axis.

        Raises:
            ConfigError: A file can't be read or written.
        """
        write_chrome_trace(Path(path), self.timelines, self._names(), None if profile is None else Path(profile))

    def _names(self) -> dict[int, str]:
        """Return the first parameter of each chunk by its index."""
        return {index: managed[0].name for index, managed in self._core.shards.by_chunk.items() if managed}
