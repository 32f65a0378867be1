"""State of the process, put back after each test: no result depends on the tests before it.

Pytest itself restores the filters of warnings.
"""

import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_device, _set_default_device),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(
        (partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name))
        for name in ("benchmark", "deterministic")
    ),
    *(
        (partial(signal.getsignal, number), partial(signal.signal, number))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM)
    ),
    *(
        (partial(getattr, logger, "level"), logger.setLevel)
        for logger in map(logging.getLogger, (None, "patrickstar", "accelerate", "lightning", "transformers", "trl"))
    ),
    (lambda: logging.root.manager.disable, logging.disable),
)
"""Functions that return and set what belongs to the whole process."""

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)
random.seed(SEED)
RANDOM_STATES = (
    (torch.set_rng_state, torch.get_rng_state()),
    (np.random.set_state, np.random.get_state()),
    (random.setstate, random.getstate()),
)
"""Each test starts from these, the same in every run."""


def _accelerate_states() -> list[dict[str, Any]]:
    state = sys.modules.get("accelerate.state")
    kinds = () if state is None else (state.PartialState, state.AcceleratorState, state.GradientState)
    return [kind._shared_state for kind in kinds]


def _variables() -> dict[bytes, bytes]:
    """Return the variables of the environment but pytest's own, thirty times as fast as by public methods."""
    return {name: value for name, value in os.environ._data.items() if name != b"PYTEST_CURRENT_TEST"}


@contextmanager
def restored() -> Iterator[None]:
    """Start with equal random numbers, and restore the process's state at the end."""
    variables = _variables()
    settings = [get() for get, _ in SETTINGS]
    states = [dict(state) for state in _accelerate_states()]
    in_group = dist.is_initialized()
    torch.set_rng_state(RANDOM_STATES[0][1])  # fixtures of wider scope may have drawn from it
    try:
        yield
    finally:
        for set_state, state in RANDOM_STATES:
            set_state(state)
        _restore(variables, settings, states, in_group)


def _restore(variables: dict[bytes, bytes], settings: list[Any], states: list[dict[str, Any]], in_group: bool) -> None:
    if dist.is_initialized() and not in_group:
        dist.destroy_process_group()
    for state, before in zip_longest(_accelerate_states(), states, fillvalue={}):
        state.clear()
        state.update(before)
    for (get, put), before in zip(SETTINGS, settings, strict=True):
        if get() != before:
            put(before)
    if (left := _variables()) != variables:
        for name in left.keys() - variables.keys():
            del os.environb[name]
        os.environb.update(variables)
