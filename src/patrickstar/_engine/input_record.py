"""Record of a forward's arguments, from which its step can be dry-run after a refusal."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def shapes_of(args: Any, kwargs: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return shape and dtype of each tensor among the arguments of a forward."""
    leaves = pytree.tree_leaves((args, kwargs))
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))


class InputRecord:
    """Arguments of a forward, of which neither memory nor a graph is kept alive."""

    def __init__(self, inputs: tuple[Any, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten(inputs)
        self._leaves = [self._record(leaf) for leaf in leaves]

    def inputs(self) -> tuple[Any, Any]:
        """Return the arguments and keyword arguments; tensors that no longer exist are on the meta device."""
        leaves = [leaf() for leaf in self._leaves]
        inputs: tuple[Any, Any] = pytree.tree_unflatten(leaves, self._structure)
        return inputs

    @staticmethod
    def _record(leaf: Any) -> Callable[[], Any]:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return lambda: leaf
        alive, meta = weakref.ref(leaf), torch.empty_like(leaf, device="meta", requires_grad=False)
        return lambda: tensor if (tensor := alive()) is not None else meta
