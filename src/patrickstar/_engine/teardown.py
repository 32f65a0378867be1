"""Teardown of an engine, which leaves an ordinary model."""

import os
import sys
import threading

import torch
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._autograd.interceptor import Interceptor
from patrickstar._autograd.module_hooks import ModuleHooks
from patrickstar._hardware.worker_pool import THREAD_NAME
from patrickstar._params.modes import managing
from patrickstar._params.state_dict import ModelState
from patrickstar.errors import DiskError, MoveError, TrainingError


def release(interceptor: Interceptor, module_hooks: ModuleHooks, state: ModelState) -> list[str]:
    """Free all chunks and leave an ordinary model, when the engine is closed or garbage-collected.

    Does nothing in a child process made by fork(): it has no access to the memory of the chunks, and shares the
    connections to other processes with its parent.

    Returns:
        Names of the parameters that were lost with a failed disk.
    """
    if os.getpid() != state.process:
        return []
    if threading.current_thread().name.startswith(THREAD_NAME):
        # The garbage collector ran in a worker thread, which has to end before the release.
        threading.Thread(target=_release_in_thread, args=(interceptor, module_hooks, state), name="release").start()
        return []
    # The garbage collector may run at any time, even while a compiler traces.
    with interceptor.lock, _disable_current_modes(), managing(), torch._C.DisableTorchFunctionSubclass():
        interceptor.window = None
        interceptor.optimizer_in_backward.cancel()
        if state.shards.saving is not None:
            state.shards.saving.cancel("the engine was closed")
        module_hooks.close()
        interceptor.data.release_all()
        if state.sharing.comm is not None and not state.synchronized:
            cause = sys.exc_info()[1] or state.shards.manager.io_dispatch.failed
            cause_text = "" if cause is None else f", after {type(cause).__name__}: {cause}"
            state.sharing.comm.leave(f"closed its engine{cause_text}")
        try:
            if state.keep_values:
                interceptor.optimizer_in_backward.optimizer_step.complete()
            else:
                interceptor.optimizer_in_backward.optimizer_step.updates.finish_running()
            state.shards.manager.complete_transfers()
        except (DiskError, MoveError, TrainingError) as error:
            # Lost parameters are found, and named, when they are read back.
            state.shards.manager.io_dispatch.failed = state.shards.manager.io_dispatch.failed or error
        finally:
            state.shards.manager.cancel_transfers()
            state.shards.manager.io_dispatch.salvaging = True
            interceptor.gradient_hooks.close()
            try:
                interceptor.optimizer_in_backward.optimizer_step.close()
            finally:
                lost = state.release()
                if state.sharing.comm is not None:
                    state.sharing.comm.close()
        return lost


def _release_in_thread(interceptor: Interceptor, module_hooks: ModuleHooks, state: ModelState) -> None:
    """Call `release` in a new thread, after making the engine's device current there."""
    state.shards.manager.hardware.enter_thread()
    release(interceptor, module_hooks, state)
