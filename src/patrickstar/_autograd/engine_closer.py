"""Closing of an engine, which leaves an ordinary model."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._autograd.engine_lock import EngineLock
from patrickstar._autograd.gradient_hooks import GradientHooks
from patrickstar._checkpoint.background_save import BackgroundSave
from patrickstar._hardware.sigint_gate import deferring_sigint, managing
from patrickstar._hardware.worker_pool import THREAD_NAME
from patrickstar._params.model_data import ModelData
from patrickstar._params.state_dict import ModelState
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import DiskError, MoveError, PeerError, TrainingError


class EngineCloser:
    """Locks one engine, closes it, also after a loss of data, and says what was lost."""

    def __init__(
        self,
        data: ModelData,
        state: ModelState,
        optimizer_in_backward: OptimizerInBackward,
        gradient_hooks: GradientHooks,
        background_save: BackgroundSave,
        lock: EngineLock,
    ) -> None:
        self.optimizer_in_backward, self.lock = optimizer_in_backward, lock
        self.closed = False
        self.undo: list[Callable[[], None]] = []
        """Take back what the engine has changed in the user's modules."""
        self._data, self._state, self._gradient_hooks = data, state, gradient_hooks
        self._background_save = background_save
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def release_with(self, owner: object) -> None:
        """Release when the owner is garbage-collected, but not at the end of the process."""
        self._finalizer = weakref.finalize(owner, self.release)
        self._finalizer.atexit = False

    def release(self) -> list[str] | None:
        """Free all chunks and leave an ordinary model, when the engine is closed or garbage-collected.

        Does nothing in a child process made by fork(): it has no access to the memory of the chunks, and shares the
        connections to other processes with its parent.

        Returns:
            Names of the parameters that were lost with a failed disk; None if the engine was closed before.
        """
        closed, self.closed = self.closed, True
        if closed:
            return None
        if self._finalizer is not None:
            self._finalizer.detach()  # or its references would keep an engine that a hook of the user refers to
        if os.getpid() != self._state.process:
            return []
        if threading.current_thread().name.startswith(THREAD_NAME):
            # The garbage collector ran in a worker thread, which has to end before the release.
            threading.Thread(target=self._release_in_thread, name="release").start()
            return []
        return self._release()

    def _release_in_thread(self) -> None:
        """Release in a new thread, after making the engine's device current there."""
        self._data.manager.hardware.enter_thread()
        self._release()

    def _release(self) -> list[str]:
        state, optimizer_step = self._state, self.optimizer_in_backward.optimizer_step
        manager = state.shards.manager
        # The garbage collector may run at any time, even while a compiler traces.
        with self.lock, _disable_current_modes(), managing(), torch._C.DisableTorchFunctionSubclass():
            self.optimizer_in_backward.cancel()
            if (saving := self._background_save.saving) is not None:
                saving.cancel("the engine was closed")
            for undo in self.undo:
                undo()
            self._data.release_all()
            if state.sharing.comm is not None and not state.synchronized:
                cause = sys.exc_info()[1] or manager.io_dispatch.failed
                cause_text = "" if cause is None else f", after {type(cause).__name__}: {cause}"
                state.sharing.comm.leave(f"closed its engine{cause_text}")
            try:
                if state.keep_values:
                    optimizer_step.complete()
                else:
                    optimizer_step.updates.finish_running()
                manager.complete_transfers()
            except (DiskError, MoveError, TrainingError) as error:
                # Lost parameters are found, and named, when they are read back.
                manager.io_dispatch.failed = manager.io_dispatch.failed or error
            finally:
                manager.cancel_transfers()
                manager.io_dispatch.salvaging = True
                self._gradient_hooks.close()
                try:
                    optimizer_step.close()
                finally:
                    if manager.io_dispatch.failed is not None:
                        state.torn = optimizer_step.updates.torn()
                    lost = state.release()
                    if state.sharing.comm is not None:
                        state.sharing.comm.close()
            return lost

    def close_engine(self, error: BaseException) -> None:
        """Close the engine after a disk or thread failure lost bytes of chunks."""
        if (lost := self.release()) is None:
            return
        # Without the other processes nothing can be read back, so that names say nothing.
        alone = isinstance(error, PeerError)
        losses = f"{len(lost)} parameters could not be read back and are NaN." if alone and lost else self.losses(lost)
        error.add_note(f"The engine is closed. {losses} Continue from a saved state with a new engine.")

    def losses(self, lost: list[str]) -> str:
        """Describe the parameters that a failed disk or thread has damaged; `lost`: those that are NaN."""
        partly = self.optimizer_in_backward.optimizer_step.updates.updated_in_part
        rounded = sorted(map(str, self._state.torn))
        losses = {
            "could not be read back and are NaN": lost,
            "may be updated in part": [name for name in partly if name not in lost],
            "are rounded as operators read them; more digits are lost": [name for name in rounded if name not in lost],
        }
        texts = [f"{len(names)} parameters {loss}: {', '.join(names)}." for loss, names in losses.items() if names]
        return " ".join(texts) or "No parameter is damaged."

    @contextmanager
    def close_on_data_loss(self) -> Iterator[None]:
        """Lock the engine and let Ctrl-C wait; close it if a failed disk or thread has lost bytes of chunks."""
        try:
            with deferring_sigint(), self.lock:
                yield
        except (DiskError, MoveError) as error:
            self.close_engine(error)
            raise
