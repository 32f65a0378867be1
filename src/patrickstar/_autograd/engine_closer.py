"""Close an engine whose disk or threads have lost bytes of chunks."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patrickstar._autograd.engine_lock import EngineLock
from patrickstar._hardware.sigint_gate import deferring_sigint
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import DiskError, MoveError, PeerError


class EngineCloser:
    """Locks one engine, closes it after a loss of data, and says what was lost."""

    def __init__(self, optimizer_in_backward: OptimizerInBackward, lock: EngineLock) -> None:
        self.optimizer_in_backward, self.lock = optimizer_in_backward, lock
        self.release: weakref.finalize[Any, Any] | None = None
        """Frees everything that the engine holds."""

    def close_engine(self, error: BaseException) -> None:
        """Close the engine after a disk or thread failure lost bytes of chunks."""
        if self.release is not None and self.release.alive:
            lost = self.release() or ()
            # Without the other processes nothing can be read back, so that the names say nothing.
            names = "" if isinstance(error, PeerError) or not lost else f": {', '.join(lost)}"
            begun = self.optimizer_in_backward.optimizer_step.updates.updated_in_part
            partly = [name for name in begun if name not in lost]
            error.add_note(
                f"The engine is closed. {len(lost)} parameters could not be read back and are NaN{names}. "
                + (f"{len(partly)} may be updated in part: {', '.join(partly)}. " if partly else "")
                + "Continue from a saved state with a new engine."
            )

    @contextmanager
    def close_on_data_loss(self) -> Iterator[None]:
        """Lock the engine and let Ctrl-C wait; close it if a failed disk or thread has lost bytes of chunks."""
        try:
            with deferring_sigint(), self.lock:
                yield
        except (DiskError, MoveError) as error:
            self.close_engine(error)
            raise
