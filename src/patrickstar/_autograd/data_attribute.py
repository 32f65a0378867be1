"""`data` of managed parameters, as users assign it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from patrickstar._autograd.lazy_tensor import LazyTensor
from patrickstar._distributed.param_sharding import local_part
from patrickstar._params.interception import adopt_view, release_view
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.param_values import replace_data
from patrickstar._params.split_lists import copy_of
from patrickstar._params.tensor_subclass import ManagedTensor, OperatorInterceptor, managed_param_of
from patrickstar._step.full_state import FullState
from patrickstar.errors import ModelError

# [Note: assigned data]
# In plain PyTorch `p.data = value` exchanges memory: afterwards the parameter and `value` share theirs, and tensors
# that shared the parameter's before keep it with the old values. Here the parameter stays in its chunk. The values are
# copied into it, `value` becomes a view of the parameter, and living views of the parameter get memory of their own
# with the old values. This is how averages are applied and restored: `backup = p.data; p.data = average; p.data =
# backup`. A backup keeps the master as well, so that restoring it loses no digits.
#
# Only `value` can become a view, not further tensors that share its memory, such as `q` of `p.data = q.data`. Their
# storage is remembered: as long as one of them lives, the engine compares it before it uses the parameter, and refuses
# to go on if it differs or if a step would change the parameter alone.


@dataclass(frozen=True)
class _Sharing:
    """Memory of an assigned tensor that other tensors share."""

    storage: StorageWeakRef
    offset: int
    strides: tuple[int, ...]

    def values(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the memory as a tensor like the parameter that should share it."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        shared = torch.empty(0, dtype=payload.dtype, device=payload.device)
        return shared.set_(storage, self.offset, payload.shape, self.strides)

    def differs(self, payload: torch.Tensor) -> bool:
        """Return whether the memory has other bits than a parameter that should share it."""
        return not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (self.values(payload), payload)))


class DataAttribute:
    """`parameter.data` of managed parameters. See [Note: assigned data]."""

    def __init__(self, full_state: FullState) -> None:
        self._full_state = full_state
        self._sharing: dict[ManagedParam, _Sharing] = {}
        self._masters: Any = WeakTensorKeyDictionary()
        """Backups with their version and master; tensors that users gave, which need none, with None."""

    def assign(self, interceptor: OperatorInterceptor, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give a parameter the values of a tensor, and make the tensor a view of the parameter.

        A view of a parameter takes the tensor's memory, as any tensor does.

        Raises:
            ModelError: The parameter can't take the place of the tensor.
        """
        managed = managed_param_of(tensor)
        if managed is None:
            release_view(tensor)
            tensor.data = value
            if isinstance(value, ManagedTensor):
                adopt_view(tensor, value._managed_params, interceptor)
            return
        if _is_own(managed, value):
            return
        _check_assignable(managed, value)
        views = self._living_views(managed)
        entry = self._masters.pop(value, None)
        master = entry[1] if entry is not None and entry[0] == value._version else None
        full = self._full_state.read(managed, managed.full_kind) if self._need_master(managed, views) else None
        shards = self._full_state.shards
        with interceptor.accessed(managed):
            shards.check_writable(managed)
            self._keep(managed, views, full)
            before = copy_of(managed) if managed.schema.gradients_beside else None
            managed.payload().copy_(local_part(value))
            torch.autograd.graph.increment_version(managed.param)
            self._full_state.follow_write(managed, master, before)
            self._share(interceptor, managed, value)

    def replace(
        self,
        interceptor: OperatorInterceptor,
        func: Callable[..., Any],
        managed: ManagedParam,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Let `p.set_(value)` assign data.

        Raises:
            ModelError: The function changes the memory or the shape of a parameter in another way.
        """
        tensor, *values = args
        assigns = func is torch.Tensor.set_ and managed_param_of(tensor) is not None and not kwargs
        if not assigns or len(values) != 1 or not isinstance(values[0], torch.Tensor):
            raise ModelError(
                f"{func.__name__} can't change the memory or the shape of parameter {managed.name!r}, which is in a "
                f"chunk: write values with copy_(), or change the model before ps.initialize"
            )
        self.assign(interceptor, tensor, values[0])
        return tensor

    def follow(self, managed: ManagedParam) -> None:
        """Copy what was written into a parameter to the tensors that share its memory in plain PyTorch."""
        sharing = self._sharing.get(managed)
        if sharing is not None and not sharing.storage.expired():
            payload = managed.payload()
            sharing.values(payload).copy_(payload)

    def check(self, interceptor: OperatorInterceptor, *, writes: bool) -> None:
        """Raise ModelError if a parameter can't be used because other tensors share memory that was assigned to it.

        `writes`: trained parameters are about to change.
        """
        for managed, sharing in list(self._sharing.items()):
            if sharing.storage.expired():
                del self._sharing[managed]
                continue
            if writes and managed.schema.trained and managed.param.requires_grad:
                raise ModelError(
                    f"parameter {managed.name!r} was given the memory of a tensor that others share, by assigning its "
                    f"`.data`, and the step would change only the parameter: assign value.clone(), or delete the others"
                )
            with interceptor.accessed(managed):
                differs = sharing.differs(managed.payload())
            if differs:
                raise ModelError(
                    f"parameter {managed.name!r} was given the memory of a tensor that others share, by assigning its "
                    f"`.data`, and one of both was written since: assign value.clone(), and again after each write"
                )

    def _living_views(self, managed: ManagedParam) -> list[torch.Tensor]:
        """Return the views and the state_dict entry of a parameter that someone still has."""
        region, storage = managed.region, managed.chunk.storage._cdata
        found: list[torch.Tensor] = []
        for view in list(managed.views.values()):
            if isinstance(view, ManagedTensor):
                part = local_part(view)
                first = part.storage_offset() * part.itemsize // managed.chunk.dtype.itemsize - region.offset
                if part.untyped_storage()._cdata == storage and 0 <= first < managed.numel:
                    found.append(view)
            elif isinstance(view, LazyTensor):
                found.append(view)
        return found

    def _is_backup(self, managed: ManagedParam, view: torch.Tensor) -> bool:
        """Return whether a view has all values of a parameter, in less precision than its master."""
        whole = view.dtype == managed.chunk.dtype and view.shape == managed.full_shape
        return whole and managed.full_dtype != view.dtype and view not in self._masters and not view.is_inference()

    def _need_master(self, managed: ManagedParam, views: list[torch.Tensor]) -> bool:
        return any(isinstance(view, LazyTensor) or self._is_backup(managed, view) for view in views)

    def _keep(self, managed: ManagedParam, views: list[torch.Tensor], master: torch.Tensor | None) -> None:
        """Give views of a parameter memory of their own, with the values that the parameter has now.

        One with a gradient stays a view to autograd, which will ask where in the parameter it was.
        """
        managed.views.clear()
        payload = managed.payload()
        first = managed.region.offset if any(view.requires_grad for view in views) else 0
        memory = torch.empty(first + managed.numel if views else 0, dtype=payload.dtype, device=payload.device)
        if views:
            memory.as_strided(payload.shape, payload.stride(), first).copy_(payload)
        for view in views:
            if isinstance(view, LazyTensor):
                assert master is not None
                view.keep(master)
                continue
            backup, part = self._is_backup(managed, view), local_part(view)
            offset = part.storage_offset() - (managed.region.offset - first) * payload.itemsize // part.itemsize
            own = torch.empty(0, dtype=part.dtype, device=part.device)
            own.set_(memory.untyped_storage(), offset, part.shape, part.stride())
            if not view.requires_grad:
                release_view(view)
            replace_data(view, own)
            if backup:
                assert master is not None
                self._masters[view] = view._version, managed.local(master)
            elif view in self._masters:
                del self._masters[view]

    def _share(self, interceptor: OperatorInterceptor, managed: ManagedParam, value: torch.Tensor) -> None:
        """Make an assigned tensor a view of its parameter; remember its memory if others share it."""
        self._sharing.pop(managed, None)
        part: Any = local_part(value)
        storage = part.untyped_storage()
        # One count each for the tensor and for `storage`; saved for a backward, the tensor has further owners.
        sole = torch._C._storage_Use_Count(storage._cdata) == 2 and part._use_count() == 1
        if sole and not value.requires_grad and not value.is_inference() and not isinstance(value, torch.nn.Parameter):
            replace_data(value, managed.current_device_view())
            adopt_view(value, (managed,), interceptor)
            self._masters[value] = None
        else:
            sharing = _Sharing(StorageWeakRef(storage), int(part.storage_offset()), part.stride())
            self._sharing[managed] = sharing


def _is_own(managed: ManagedParam, value: torch.Tensor) -> bool:
    """Return whether assigned data are the parameter's own, in their place."""
    if managed_param_of(value) is managed:
        return True
    if isinstance(value, LazyTensor):
        return managed.views.get(id(value)) is value
    if not isinstance(value, ManagedTensor) or managed not in value._managed_params:
        return False
    part, region = local_part(value), managed.region
    placed = tuple(part.shape) == region.shape and part.storage_offset() == region.offset
    return placed and part.dtype == managed.chunk.dtype and _has_strides(part, region.strides)


def _has_strides(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides in the dimensions of more than one element."""
    return all(
        size == 1 or own == stride for size, own, stride in zip(value.shape, value.stride(), strides, strict=True)
    )


def _check_assignable(managed: ManagedParam, value: torch.Tensor) -> None:
    """Raise ModelError if a parameter can't take the place of a tensor that was assigned to its `data`."""
    name, chunk = managed.name, managed.chunk
    if isinstance(value, LazyTensor) or (isinstance(value, ManagedTensor) and managed not in value._managed_params):
        other = "a gradient or a state" if isinstance(value, LazyTensor) else f"{value._managed_params[0].name!r}"
        raise ModelError(f"`.data` of parameter {name!r} can't share the memory of {other}: assign value.clone()")
    if value.shape != managed.full_shape:
        raise ModelError(
            f"`.data` of parameter {name!r} of shape {managed.full_shape} was assigned a tensor of shape "
            f"{tuple(value.shape)}: resize the model, as by resize_token_embeddings, before ps.initialize"
        )
    placed = not managed.is_dtensor or getattr(value, "placements", None) == managed.placements
    if value.dtype != chunk.dtype or value.device != chunk.compute_device or not placed:
        raise ModelError(
            f"parameter {name!r} is stored in a chunk with dtype {chunk.dtype} on {chunk.compute_device}; it can't be "
            f"replaced by {value.dtype} on {value.device}. Set precision and device in ps.Config, or load "
            f"engine.state_dict() into another model"
        )
    part = local_part(value)
    own = isinstance(value, ManagedTensor)  # but with other strides, or elsewhere
    if own or part.layout is not torch.strided or not _has_strides(part, managed.region.strides):
        raise ModelError(
            f"`.data` of parameter {name!r} with strides {managed.region.strides} was assigned a tensor with other "
            f"strides or layout: copy the values instead, p.data.copy_(value.clone()), or change the layout before "
            f"ps.initialize"
        )
    if not part.untyped_storage().resizable():
        raise ModelError(
            f"`.data` of parameter {name!r} can't share memory with numpy, a file or another process: assign "
            f"value.clone()"
        )
