"""Operators inside transforms of torch.func, which read copies of parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map_only

from patrickstar._params.tensor_subclass import ManagedTensor, descriptor
from patrickstar.errors import ModelError

# [Note: transforms of torch.func]
# Inside `grad`, `vmap`, `jvp` and the like, operators run several times, on tensors that wrap others, and their
# backward is called with create_graph=True. Neither windows on its nodes nor the storages of its outputs say which
# parameters are needed when. So an operator there gets a copy of each parameter, made outside of the transforms:
# gradients reach the parameter through it, and it stays as long as the graph needs it. Derivatives of any order are
# those of plain PyTorch; the price is the memory of the copies. Detached parameters are not copied: see `DetachedView`.


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter, or -1 for tensors created in inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def run_on_copies(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], operate: Callable[..., Any]
) -> Any:
    """Run an operator with a copy of each parameter, which `operate` makes. See [Note: transforms of torch.func].

    Raises:
        ModelError: The operator writes a parameter in place.
    """
    if func in (torch.Tensor.detach, descriptor("data").__get__):
        with temporarily_clear_interpreter_stack():
            return operate(func, args, kwargs, [args[0]], args[0]._managed_params)
    copies: list[torch.Tensor] = []
    names: list[str] = []

    def copied(tensor: Any) -> torch.Tensor:
        names.append(tensor._managed_params[0].name)
        with temporarily_clear_interpreter_stack():
            copies.append(operate(torch.Tensor.clone, (tensor,), {}, [tensor], tensor._managed_params))
        return copies[-1]

    copied_args, copied_kwargs = tree_map_only(ManagedTensor, copied, (args, kwargs))
    versions = [version_of(tensor) for tensor in copies]
    out = func(*copied_args, **copied_kwargs)
    if versions != [version_of(tensor) for tensor in copies]:
        raise ModelError(
            f"{getattr(func, '__name__', func)} writes parameter {names[0]!r} inside a transform of torch.func, where "
            f"parameters are read only: write it outside"
        )
    return out
