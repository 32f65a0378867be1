"""Lock of an engine, which one thread holds while it uses the engine or a managed tensor."""

import os
import sys
import threading
import time
from collections import deque
from threading import get_ident
from types import TracebackType

import torch

from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar.errors import TrainingError

# [Note: threads]
# A call of the engine, an operator on managed tensors outside of one, the read of a lazy tensor and a backward hold the
# engine's lock for their whole length. Other threads wait for their turn, in the order in which they came. So a logger
# or an evaluation in a second thread sees values between two calls, never within one.
#
# Autograd runs the nodes of an accelerator in a thread of its own, while the thread that called backward waits for it.
# What these nodes do belongs to that thread's turn, so autograd's thread passes without taking the lock.
#
# A thread would wait for ever if the holder waited for it, as a hook does that takes a result from an executor. A
# holder that executes no Python code for `PATIENCE_S` is taken for one, and the waiting call is refused.

PATIENCE_S = 60.0
POLL_S = 0.5
"""Interval at which a waiting thread looks at what the holder does."""
_RUN_BACKWARD = "_engine_run_backward"
"""Function of PyTorch in which a thread waits for autograd's threads."""


class EngineLock:
    """Re-entrant lock; use it as a context. See [Note: threads].

    Args:
        process: Id of the process that owns the chunks.
        has_device_thread: Autograd runs nodes in threads of its own.
    """

    def __init__(self, process: int, has_device_thread: bool) -> None:
        self.owner = 0
        """Identity of the thread that holds the lock, 0 if none does."""
        self._process = process
        self._depth = 0
        self._backwards = 0
        self._has_device_thread = has_device_thread
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        self._passed = 0
        """Number of times that autograd's threads passed, which shows that a backward goes on."""

    def check_process(self, subject: str = "the engine") -> None:
        """Raise TrainingError in a child made by fork()."""
        if os.getpid() != self._process:
            raise TrainingError(
                f"{subject} is stored in the memory of process {self._process}, and process {os.getpid()}, its child "
                f"made by fork(), has no access to it: use it in the process that created the engine, and pass copies "
                f"to the child (engine.state_dict())"
            )

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, subject: str = "the engine") -> None:
        """Wait for the lock, and hold it until `release`. `subject`: what is used, for errors.

        Raises:
            TrainingError: The holder seems to wait for this thread, or the caller is a child made by fork().
        """
        me = get_ident()
        if self.owner == me:
            self._depth += 1
            return
        self.check_process(subject)
        if self._holder_waits_for_me():
            return
        try:
            with self._changed:
                if self.owner or self._queue:
                    self._wait(me, subject)
                if not self._holder_waits_for_me():
                    self.owner, self._depth = me, 1
        except BaseException:
            if self.owner == me:
                self._free()
            raise

    def release(self) -> None:
        """End one use; after the last one the next thread gets its turn."""
        if self.owner != get_ident():  # autograd's thread, in another thread's turn
            return
        self._depth -= 1
        if self._depth <= 0:
            self._free()

    def begin_backward(self) -> bool:
        """Hold the lock for a backward. Return False if the thread that waits for the backward holds it already."""
        self.acquire()
        self._backwards += 1
        return self.owner == get_ident()

    def end_backward(self, holds: bool) -> None:
        """End a backward, perhaps in another thread of autograd's. `holds`: what `begin_backward` has returned."""
        self._backwards -= 1
        if holds:
            self.owner = get_ident()
            self.release()

    def _free(self) -> None:
        with self._changed:
            self.owner = self._depth = 0
            self._changed.notify_all()

    def _wait(self, me: int, subject: str) -> None:
        """Wait until the lock is free and this thread is the first of those that wait."""
        self._queue.append(me)
        try:
            seen, moved_s = self._position(), time.monotonic()
            while (self.owner or self._queue[0] != me) and not self._holder_waits_for_me():
                self._changed.wait(POLL_S)
                interruption_point()
                now = self._position()
                if now != seen:
                    seen, moved_s = now, time.monotonic()
                elif time.monotonic() - moved_s > PATIENCE_S:
                    raise TrainingError(self._refusal(subject))
        finally:
            self._queue.remove(me)
            self._changed.notify_all()

    def _position(self) -> object:
        """Return where the holder is: a value that changes while it executes Python code."""
        frame = sys._current_frames().get(self.owner)
        return self.owner, self._passed, frame and (id(frame), frame.f_lasti)

    def _holder_waits_for_me(self) -> bool:
        """Return whether this is a thread of autograd's in a backward that the holder waits for."""
        if not self._has_device_thread or not self.owner or torch._C._current_graph_task_id() < 0:
            return False
        frame = None if self._backwards else sys._current_frames().get(self.owner)
        passes = self._backwards > 0 or (frame is not None and frame.f_code.co_name == _RUN_BACKWARD)
        self._passed += passes
        return passes

    def _refusal(self, subject: str) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        me, holder = names.get(get_ident(), get_ident()), names.get(self.owner, self.owner)
        frame = sys._current_frames().get(self.owner)
        place = "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"
        return (
            f"{subject} is used in thread {me!r} while thread {holder!r} uses the engine, which has not gone on for "
            f"{PATIENCE_S:.0f} s{place}: it seems to wait for this thread. Read parameters and gradients in the thread "
            f"that calls the engine and pass on copies, or don't wait for this thread in the model or in a hook"
        )
