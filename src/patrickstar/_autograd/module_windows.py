"""Calls of modules whose operators can't be intercepted one by one: one window for the whole call."""

from typing import Any, NamedTuple

from patrickstar._autograd.interceptor import Interceptor
from patrickstar._autograd.windows import GraphSnapshot, Window
from patrickstar._params.interception import intercept_parameter, let_through
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import managed_param_of


class ModuleUse(NamedTuple):
    """One running call of a module that has a single window for all its operators."""

    managed_params: tuple[ManagedParam, ...]
    let_through: list[ManagedParam]
    """Parameters that are not intercepted during the call."""
    before: GraphSnapshot
    suspended: Window | None


def open_module_window(interceptor: Interceptor, managed_params: tuple[ManagedParam, ...], inputs: Any) -> ModuleUse:
    """Fetch all parameters of a module, and make them plain Parameters until `close_module_window`.

    Until then other threads wait for the engine.
    """
    before = GraphSnapshot.now(inputs, {})
    interceptor.lock.acquire(f"parameter {managed_params[0].name!r}" if managed_params else "the engine")
    try:
        suspended = interceptor.access(managed_params)
    except BaseException:
        interceptor.lock.release()
        raise
    let = [managed for managed in managed_params if managed_param_of(managed.param) is not None]
    for managed in let:
        let_through(managed)
    return ModuleUse(managed_params, let, before, suspended)


def abandon_module_window(interceptor: Interceptor, use: ModuleUse) -> None:
    """End a module call that raised an exception, which other processes may not have."""
    for managed in use.let_through:
        intercept_parameter(managed)
    try:
        interceptor.end_uses(use.managed_params, use.suspended)
    finally:
        interceptor.lock.release()


def close_module_window(interceptor: Interceptor, use: ModuleUse, out: Any) -> None:
    """End a module call that returned `out`, and register its window on each node that it added to the graph."""
    for managed in use.let_through:
        intercept_parameter(managed)
    try:
        interceptor.track_outputs(out, use.managed_params, use.before)
        interceptor.end_operator(use.managed_params, use.suspended)
    finally:
        interceptor.lock.release()
