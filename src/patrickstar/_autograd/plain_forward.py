"""Forwards in which held parameters are ordinary Parameters, whose operators cost nothing extra."""

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patrickstar._autograd.interceptor import Interceptor
from patrickstar._memory.chunk import Chunk
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.modes import managing
from patrickstar._params.tensor_subclass import ChunkParameter, adopt_view

# [Note: plain forwards]
# While chunks are held (see [Note: resident iterations]), an operator needs interception for two reasons only: to
# notice in-place writes, and to adopt views of parameters that outlive it. The first shows in version counters after
# the forward. The second shows in the number of tensors that use a chunk's storage. The first held forward of each kind
# is intercepted: if no view outlives it, the number of tensors that it adds, all of them in its graph, is recorded, and
# the next forwards of the kind are plain. If one adds more, the views among all Python objects are adopted.


class PlainForward:
    """Switches held parameters to plain Parameters for the length of one forward."""

    def __init__(self, interceptor: Interceptor) -> None:
        self.interceptor = interceptor
        self._added: dict[Hashable, dict[Chunk, int] | None] = {}
        """Tensors that a forward of each kind adds to each chunk's storage; None if views outlive the forward."""

    @contextmanager
    def __call__(self, key: Hashable) -> Iterator[None]:
        """Run a forward; with held chunks and once its kind is known, with plain parameters."""
        interceptor = self.interceptor
        if not interceptor.data.residency.active:
            yield
            return
        if key not in self._added:
            before = self._counts(interceptor.data.manager.held)
            interceptor.adopted = []
            try:
                yield
            finally:
                views, interceptor.adopted = interceptor.adopted, None
            has_views = any(view() is not None for view in views)
            self._added[key] = None if has_views else self._difference(before)
            return
        expected = self._added[key]
        if expected is None:
            yield
            return
        before = self._counts(chunk for chunk in expected if chunk.held)
        plain = []
        with torch._C.DisableTorchFunctionSubclass():
            for managed in interceptor.data.managed_params:
                if managed.chunk in before and not managed.embedding and not managed.has_any_gradient:
                    param: Any = managed.param
                    plain.append((managed, param, param._version, param.data_ptr()))
                    param.__class__ = nn.Parameter
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for managed, param, version, address in plain:
                    param.__class__ = ChunkParameter
                    if param._version != version or param.data_ptr() != address:
                        with managing():
                            self._take_write(managed, address)
            added = self._difference(before)
            if any(count > expected[chunk] for chunk, count in added.items()):
                found = self._adopt_views(before)
                more = {chunk: max(expected[chunk], added.get(chunk, 0)) for chunk in expected}
                self._added[key] = None if found else more

    def invalidate(self) -> None:
        """Forget all kinds of forwards, since chunks were replaced."""
        self._added.clear()

    @staticmethod
    def _counts(chunks: Any) -> dict[Chunk, int]:
        return {chunk: torch._C._storage_Use_Count(chunk.storage._cdata) for chunk in chunks}

    def _difference(self, before: dict[Chunk, int]) -> dict[Chunk, int]:
        return {chunk: count - before[chunk] for chunk, count in self._counts(before).items()}

    def _take_write(self, managed: ManagedParam, address: int) -> None:
        """Take over an in-place write, or copy an assigned `parameter.data` into the chunk as if intercepted."""
        if managed.param.data_ptr() == address:
            self.interceptor.data.on_in_place_write(managed)
            return
        value = managed.param.data
        managed.param.data = managed.current_device_view()
        self.interceptor.assign_data(managed, value)

    def _adopt_views(self, chunks: dict[Chunk, int]) -> bool:
        """Start to intercept the views of parameters among all Python objects. Return whether there is one."""
        by_storage = {chunk.storage._cdata: chunk for chunk in chunks}
        found = False
        for value in gc.get_objects():
            if type(value) is not torch.Tensor or value.layout is not torch.strided:
                continue
            chunk = by_storage.get(value.untyped_storage()._cdata)
            if chunk is None or chunk.is_own_view(value):
                continue
            managed_params = tuple(
                managed
                for managed in self.interceptor.data.by_chunk[chunk.index]
                if managed.device_view is not value and managed.contains(int(value.storage_offset()))
            )
            if managed_params:
                adopt_view(value, managed_params, self.interceptor)
                found = True
        return found
