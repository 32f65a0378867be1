"""Decorator of functions that Ctrl-C does not interrupt."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from patrickstar._hardware.sigint_gate import uninterruptible

P = ParamSpec("P")
R = TypeVar("R")


def defer_sigint(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function a section that Ctrl-C does not interrupt."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with uninterruptible():
            return function(*args, **kwargs)

    return wrapper
