"""`grad` and `data` of managed parameters, as users read and assign them."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from patrickstar._autograd.engine_closer import EngineCloser
from patrickstar._autograd.engine_lock import EngineLock
from patrickstar._autograd.lazy_tensor import LazyTensor
from patrickstar._distributed.param_sharding import local_part
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import ManagedTensor
from patrickstar._schedule.coordination import Request
from patrickstar._step.gradients import Gradients
from patrickstar._step.optimizer_in_backward import OptimizerInBackward
from patrickstar.errors import ModelError, TrainingError


class GradientElements:
    """Elements of a parameter's gradient; see `Elements`."""

    def __init__(self, managed: ManagedParam, gradients: Gradients, dtype: torch.dtype, closer: EngineCloser) -> None:
        self.managed, self.dtype = managed, dtype
        self._gradients, self._closer = gradients, closer

    @property
    def name(self) -> str:
        return f"the gradient of {self.managed.name!r}"

    @property
    def lock(self) -> EngineLock:
        return self._closer.lock

    @property
    def version(self) -> Hashable:
        return self.managed.steps, self.managed.param._version, self._gradients.writes

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        with self._closer.close_on_data_loss():
            gradient = self._gradients.read(self.managed)
        if gradient is None:
            raise TrainingError(
                f"{self.name} does not exist any more: optimizer.step() has used it, or it was discarded; clone() a "
                f"gradient to keep its values"
            )
        return gradient.to(self.dtype) if out is None else out.copy_(gradient)

    def write(self, value: torch.Tensor) -> None:
        with self._closer.close_on_data_loss():
            self._gradients.write(self.managed, value)


class GradientAttribute:
    """`parameter.grad` of managed parameters. See [Note: lazy tensors]."""

    def __init__(self, gradients: Gradients, optimizer_in_backward: OptimizerInBackward) -> None:
        self.gradients, self.optimizer_in_backward = gradients, optimizer_in_backward

    def read(self, managed: ManagedParam, closer: EngineCloser) -> torch.Tensor | None:
        """Return the gradient, None without one. With several processes all must call this.

        Raises:
            TrainingError: A hook reads it in a backward that several processes share.
        """
        shards = self.gradients.shards
        if self.optimizer_in_backward.active or shards.closed:
            return None  # the update has used it
        if shards.world.size > 1 and shards.backwards_in_step:
            if shards.in_backward:
                raise TrainingError(
                    f"the gradient of {managed.name!r} is not complete before the end of the backward, when all "
                    f"processes average it: read it after engine.backward(loss)"
                )
            self.gradients.sharing.synchronize_gradients(Request.STATE)
        self.gradients.store_zeros(managed)
        if not managed.in_next_step:
            return None
        dtype = self.gradients.stored_dtype(managed)
        elements = GradientElements(managed, self.gradients, dtype, closer)
        return LazyTensor(elements, managed.full_shape, managed.full_strides, dtype, shards.manager.device)

    def assign(self, managed: ManagedParam, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """Discard the gradient of a parameter, and store `value` in its chunk if it is a tensor.

        Raises:
            ModelError: The value has another shape, dtype or device than the parameter.
            TrainingError: Gradients were clipped or used by an update, or several processes would have to agree.
        """
        self.optimizer_in_backward.check_inactive("assigning a gradient")
        if value is not None and _is_own(managed, value):
            return
        if value is not None:
            self.gradients.check_final(managed)
            _check_assignable(managed, value)
        param.grad = None
        self.gradients.unscaled.discard(managed)
        self.gradients.forget((managed,))
        self.optimizer_in_backward.optimizer_step.updates.complete((managed,))
        self.gradients.sharing.discard_gradient(managed)
        if value is not None:
            self.gradients.sharing.accept_gradient(managed, value.detach())


def _is_own(managed: ManagedParam, value: torch.Tensor) -> bool:
    """Return whether an assigned gradient is the parameter's own, as after `parameter.grad *= 2`."""
    elements = value._source.elements if isinstance(value, LazyTensor) else None
    return isinstance(elements, GradientElements) and elements.managed is managed and value.shape == managed.full_shape


def _check_assignable(managed: ManagedParam, value: torch.Tensor) -> None:
    if managed.chunk.sharded:
        raise TrainingError(
            f"the gradient of {managed.name!r} can't be assigned, since several processes average it: write into "
            f"parameter.grad in all of them after engine.backward(loss)"
        )
    expected = managed.shape, managed.chunk.dtype, managed.chunk.compute_device.type
    given = tuple(value.shape), value.dtype, value.device.type
    if given != expected or value.layout is not torch.strided:
        raise ModelError(
            f"a gradient of {', '.join(map(str, given))} was assigned to parameter {managed.name!r} of "
            f"{', '.join(map(str, expected))}: they have to be equal"
        )


def copied_in_full(args: Sequence[Any]) -> tuple[Sequence[Any], torch.Tensor | None]:
    """Return the arguments of `target.copy_(source)`, and `source` if it sets a whole parameter in another dtype.

    The master then takes the values without the rounding of the compute dtype. A lazy source is read once.
    """
    target, source = args[0], args[1]
    if isinstance(source, LazyTensor):
        source = source.clone()
        args = (target, source, *args[2:])
    managed = target._managed_params[0] if isinstance(target, ManagedTensor) else None
    if managed is not None and managed.is_dtensor and type(source) in (torch.Tensor, torch.nn.Parameter):
        args, source = copied_part(managed, args)
        return args, None if source.dtype == target.dtype else source
    if managed is None or not isinstance(source, torch.Tensor) or source.dtype == target.dtype:
        return args, None
    whole = target.shape == managed.full_shape and target.stride() == managed.full_strides
    if managed.is_dtensor and whole:
        whole, source = getattr(source, "placements", None) == managed.placements, local_part(source)
    return args, source if whole and target.dtype == managed.chunk.dtype and source.layout is torch.strided else None


def copied_part(managed: ManagedParam, args: Sequence[Any]) -> tuple[Sequence[Any], torch.Tensor]:
    """Return the arguments of `target.copy_(source)` for a whole value of a DTensor, and this process's part of it."""
    from patrickstar._params.dtensor import like

    target, source = args[0], args[1].detach()
    if source.shape != managed.full_shape:
        source = source.expand(managed.full_shape)
    part = managed.local(source)
    return (target, like(target, part.to(target.device)), *args[2:]), part


WRITERS = frozenset((torch.Tensor.copy_, torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.lerp_))
"""In-place functions by which users keep copies and averages of parameters."""


def check_written_precision(func: Any, args: Sequence[Any], source: torch.Tensor) -> None:
    """Raise ModelError if a tensor of a parameter's shape takes its rounded values though it could hold all digits."""
    target, managed = args[0], source._managed_params[0]  # type: ignore[attr-defined]
    if (
        isinstance(target, torch.Tensor)
        and not isinstance(target, ManagedTensor)
        and target.shape == managed.full_shape
        and managed.schema.trained
        and target.is_floating_point()
        and source.dtype.itemsize < min(target.dtype.itemsize, managed.full_dtype.itemsize)
    ):
        raise ModelError(
            f"{func.__name__} writes parameter {managed.name!r} into a tensor of {target.dtype}, but operators compute "
            f"with a copy that is rounded to {source.dtype}. Its full precision is in module.state_dict() and "
            f"engine.state_dict(); ps.EMA(engine) keeps an average. If rounded values are meant, clone() the parameter"
        )
