"""Selective checkpointing: a layer stores what its products and its attention return, and computes the rest again.

[Note: stored products]
Recomputation repeats what is cheap, such as norms, activations and sums, and takes from memory what is not. Operators
run below autograd in forward, where their results are stored, and in recomputation, where these are returned in their
order. So autograd's graph is that of any recomputed layer, and so are the bits. What has changed since it was stored,
as by an operator in place, is computed again, and so is all if backward runs a second time. Attention with dropout is
never stored: recomputation draws the random numbers that forward drew only if it runs the same random operators.

What is stored passes through the hooks for saved tensors around the layer, so that it can be offloaded.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_DROPOUT = {func: [each.name for each in func._schema.arguments].index("dropout_p") for func in _ATTENTION}
"""Operators of attention, and the position of their probability of dropout."""
STORED = frozenset([_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default, *_ATTENTION])
"""Operators whose results are stored: products with a weight, whose other side has the tokens, and fused attention."""


class _StoredTensor:
    """Tensor that an operator returned, packed by the hooks around the layer, if there are any."""

    def __init__(self, tensor: torch.Tensor, hooks: Any) -> None:
        # Below autograd a view would have a version of its own.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = tensor.detach()
        self._alias, self._version = weakref.ref(alias), alias._version
        self._packed: Any = alias if hooks is None else hooks[0](alias)
        self._unpack: Callable[[Any], torch.Tensor] | None = None if hooks is None else hooks[1]

    def get(self) -> torch.Tensor | None:
        """Return the tensor, None if it has changed; a copy that hooks made has not, unless they say so."""
        alias = self._alias()
        if (alias is not None and alias._version != self._version) or getattr(self._packed, "changed", False):
            return None
        tensor: torch.Tensor = self._packed if self._unpack is None else self._unpack(self._packed)
        return tensor


class _Mode(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let layers be compiled in this mode; compiled code has no operators to store."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.run(func, args, kwargs) if _is_stored(func, args, kwargs) else func(*args, **kwargs)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator whose result is stored."""
        raise NotImplementedError


class _Storing(_Mode):
    """Stores results in forward. `hooks` pack and unpack saved tensors."""

    def __init__(self, results: deque[Any], hooks: Any) -> None:
        super().__init__(results)
        self._hooks = hooks

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.results.append(pytree.tree_map_only(torch.Tensor, lambda each: _StoredTensor(each, self._hooks), out))
        return out


class _Returning(_Mode):
    """Returns stored results in recomputation, each once; what is left at its end is not needed."""

    def __enter__(self) -> Any:
        # What is offloaded comes back in the reverse order.
        found = deque(_unpacked(result) for result in reversed(self.results))
        self.results.clear()
        self.results.extend(reversed(found))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = self.results.popleft() if self.results else None
        return func(*args, **kwargs) if result is None else result

    def __exit__(self, *error: Any) -> None:
        self.results.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def _unpacked(result: Any) -> Any:
    """Return what an operator returned, None if a tensor of it has changed."""
    leaves, structure = pytree.tree_flatten(result)
    found = [each.get() if isinstance(each, _StoredTensor) else each for each in leaves]
    changed = any(isinstance(each, _StoredTensor) and got is None for each, got in zip(leaves, found, strict=True))
    return None if changed else pytree.tree_unflatten(found, structure)


def _is_stored(func: Any, args: Any, kwargs: Any) -> bool:
    if func not in STORED:
        return False
    position = _DROPOUT.get(func)
    if position is None:
        return True
    dropout = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return not dropout


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a layer's forward and of its recomputation, for `torch.utils.checkpoint.checkpoint`."""
    results: deque[Any] = deque()
    return _Storing(results, torch._C._autograd._top_saved_tensors_default_hooks(True)), _Returning(results)
