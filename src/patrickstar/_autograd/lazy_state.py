"""Entries of `module.state_dict()` and of `optimizer.state`: lazy tensors with the bits of masters and states."""

from collections.abc import Hashable
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from patrickstar._autograd.engine_lock import EngineLock
from patrickstar._autograd.interceptor import Interceptor
from patrickstar._autograd.lazy_tensor import LazyTensor
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import ManagedTensor, managed_param_of


@dataclass(frozen=True)
class ListElements:
    """Elements of a parameter in one chunk list; see `Elements`. Equal if they are the same elements."""

    _interceptor: Interceptor
    _managed: ManagedParam
    _kind: str

    @property
    def name(self) -> str:
        entry = "the state_dict entry" if self._kind == self._managed.full_kind else f"the state {self._kind!r}"
        return f"{entry} of {self._managed.name!r}"

    @property
    def lock(self) -> EngineLock:
        return self._interceptor.lock

    @property
    def version(self) -> Hashable:
        return self._managed.steps, self._managed.param._version, self._interceptor.full_state.writes

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        with self._interceptor.closer.close_on_data_loss():
            return self._interceptor.full_state.read(self._managed, self._kind, out)

    def write(self, value: torch.Tensor) -> None:
        self._interceptor.optimizer_in_backward.check_inactive("writing a state")
        with self._interceptor.closer.close_on_data_loss():
            self._interceptor.full_state.write(self._managed, self._kind, value)


class LazyState:
    """Lazy tensors of one engine's parameters and states."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._params: WeakValueDictionary[ManagedParam, LazyTensor] = WeakValueDictionary()
        """One tensor per parameter, so that savers recognise tied entries."""

    def tensor(self, managed: ManagedParam, kind: str) -> torch.Tensor:
        """Return a parameter in list `kind` as a lazy tensor on the host.

        With several processes it is a copy: a read is collective, and all of them read at once.
        """
        shards = self._interceptor.data.shards
        if shards.world.size > 1:
            return self._interceptor.full_state.read(managed, kind)
        is_param = kind == managed.full_kind
        if is_param and (known := self._params.get(managed)) is not None and id(known) in managed.views:
            return known  # it has not kept values that the parameter had before an assignment of its data
        dtype = shards.dtype_of(managed, kind)
        elements = ListElements(self._interceptor, managed, kind)
        lazy = LazyTensor(elements, managed.full_shape, managed.full_strides, dtype, torch.device("cpu"))
        if is_param:
            self._params[managed] = managed.views[id(lazy)] = lazy
        return lazy

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Prepare the entries of one module's own parameters: a pre-hook of its `state_dict`."""
        if keep_vars:  # the entries are the parameters themselves
            return
        for param in module._parameters.values():
            if (managed := managed_param_of(param)) is not None:
                self._interceptor.listed[get_ident(), managed] = self.tensor(managed, managed.full_kind)

    def after_state_dict(self, module: nn.Module, entries: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace what a module's own way to fill its state dict has fetched: a hook of its `state_dict`."""
        for name, param in module._parameters.items():
            if (managed := managed_param_of(param)) is None:
                continue
            self._interceptor.listed.pop((get_ident(), managed), None)
            entry = entries.get(prefix + name)
            if isinstance(entry, ManagedTensor) and not entry._is_whole:
                entries[prefix + name] = self.tensor(managed, managed.full_kind)
