"""Decorator of methods that use the whole engine."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from patrickstar._hardware.defer_sigint import handle_sigint

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def engine_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let other threads wait for a method of an engine or its core, and handle Ctrl-C between sections within it."""

    @handle_sigint
    @functools.wraps(method)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        core: Any = getattr(self, "_core", self)
        with core.interceptor.lock:
            return method(self, *args, **kwargs)

    return wrapper
