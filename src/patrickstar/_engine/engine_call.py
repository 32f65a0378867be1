"""Decorator of methods that use the whole engine."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from patrickstar._hardware.sigint_gate import deferring_sigint

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def engine_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let other threads wait for a method of an engine or its core, and let Ctrl-C wait for its end."""

    @functools.wraps(method)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        core: Any = getattr(self, "_core", self)
        with deferring_sigint(), core.interceptor.lock:
            return method(self, *args, **kwargs)

    return wrapper
