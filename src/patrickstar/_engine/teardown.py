"""How an engine ends: an ordinary model stays behind."""

import os
import sys
import threading

import torch
from torch.utils._python_dispatch import _disable_current_modes

from patrickstar._autograd.interceptor import Interceptor, managing
from patrickstar._autograd.module_hooks import ModuleHooks
from patrickstar._memory.worker_pool import THREAD_NAME
from patrickstar._params.state_dict import ModelState
from patrickstar.errors import DiskError, MoveError, TrainingError


def release(interceptor: Interceptor, blocks: ModuleHooks, state: ModelState) -> list[str]:
    """Leave an ordinary model behind: when the engine is closed, or when nobody holds it any more.

    Returns the names of parameters that were lost with a disk that has failed. Does nothing in a child made by fork():
    it has none of the chunks' memory, and shares the connections to other processes with its parent.
    """
    if os.getpid() != state.process:
        return []
    if threading.current_thread().name.startswith(THREAD_NAME):
        # The garbage collector came by in a thread that must end for this.
        threading.Thread(target=_release_there, args=(interceptor, blocks, state), name="release").start()
        return []
    # The garbage collector may come at any time, in the middle of a compiler's tracing too.
    with _disable_current_modes(), managing(), torch._C.DisableTorchFunctionSubclass():
        interceptor.window = None
        interceptor.optimizer_in_backward.cancel()
        if state.data.saving is not None:
            state.data.saving.cancel("the engine was closed")
        blocks.close()
        state.data.release_all()
        if state.data.comm is not None and not state.synchronized:
            cause = sys.exc_info()[1] or state.data.manager.io_dispatch.failed
            why = "" if cause is None else f", after {type(cause).__name__}: {cause}"
            state.data.comm.leave(f"closed its engine{why}")
        try:
            if state.keep_values:
                interceptor.optimizer_in_backward.optimizer_step.complete()
            state.data.manager.complete_transfers()
        except (DiskError, MoveError, TrainingError) as error:
            # What is lost shows when parameters are read back, and is told by name.
            state.data.manager.io_dispatch.failed = state.data.manager.io_dispatch.failed or error
        finally:
            state.data.manager.cancel_transfers()
            state.data.manager.io_dispatch.salvaging = True
            interceptor.close()
            lost = state.release()
            if state.data.comm is not None:
                state.data.comm.close()
        return lost


def _release_there(interceptor: Interceptor, blocks: ModuleHooks, state: ModelState) -> None:
    """Call `release` in a new thread, whose current device is not the engine's yet."""
    state.data.manager.hardware.enter_thread()
    release(interceptor, blocks, state)
