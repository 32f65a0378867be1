"""Callback of the Trainer that records the steps of training in a run's log, and shows them in its progress bar."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from patrickstar._engine.engine import Engine
from patrickstar._engine.recording import Recording
from patrickstar._engine.run_log import memory_figures, waiting_figure


class RecordCallback(TrainerCallback):
    """Recording of each call of `train()`. See `Trainer.record`.

    Args:
        engine: Returns the engine that trains.
        callbacks: Returns the Trainer's callbacks, among which may be one with a progress bar.
        log: File of the run's log.
        tensorboard: Directory of its log for TensorBoard.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        callbacks: Callable[[], CallbackHandler],
        log: str | Path | None,
        tensorboard: str | Path | None,
    ) -> None:
        self._engine, self._callbacks = engine, callbacks
        self._log, self._tensorboard = log, tensorboard
        self._recording: Recording | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to record; a resumed run continues its log."""
        self.on_train_end(args, state, control)  # of a training that ended by an error
        writes = state.is_world_process_zero
        self._recording = self._engine().record(
            self._log if writes else None,
            steps=state.global_step,
            tensorboard=self._tensorboard if writes else None,
        )
        self._recording.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show memory and waits of the step in the progress bar, if there is one."""
        record = None if self._recording is None else self._recording.last
        if record is None:
            return
        figures = [*memory_figures(record, self._engine().device_budget_bytes), waiting_figure(record)]
        for callback in self._callbacks().callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.set_postfix_str(", ".join(figures))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add loss, learning rate and norm to the record of the step, if it is logged."""
        if self._recording is not None and logs is not None and "loss" in logs:
            norm = logs.get("grad_norm")
            self._recording.log(
                loss=logs["loss"],
                learning_rate=logs.get("learning_rate"),
                gradient_norm=None if norm is None else float(norm),
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the recording."""
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None
