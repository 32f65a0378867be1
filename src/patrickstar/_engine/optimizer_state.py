"""`optimizer.state`: the states of each parameter that has been updated."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from patrickstar._autograd.lazy_tensor import LazyTensor
from patrickstar._engine.core import EngineCore
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.errors import ModelError


class ParamStates(MutableMapping[str, Any]):
    """States of one parameter by name. An assigned tensor is written into the chunks."""

    def __init__(self, core: EngineCore, managed: ManagedParam) -> None:
        self._core, self._managed = core, managed

    @property
    def _kinds(self) -> tuple[str, ...]:
        return self._managed.state_kinds if self._managed.steps else ()

    def __getitem__(self, key: str) -> Any:
        if key in self._kinds:
            return self._core.lazy_state.tensor(self._managed, key)
        if key == "step" and self._managed.steps and not self._core.config.optimizer.counts_itself:
            return torch.tensor(float(self._managed.steps), device="cpu")
        return self._managed.optimizer_extra[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "step" and "step" in self and not self._core.config.optimizer.counts_itself:
            self._managed.steps = int(value)
        elif key not in self._kinds:
            self._managed.optimizer_extra[key] = value
        elif value is not self[key] and not (isinstance(value, LazyTensor) and value.stores_same(self[key])):
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != self._managed.full_shape:
                raise ModelError(f"the state {key!r} of {self._managed.name!r} has to be a tensor of its shape")
            with self._core.interceptor.lock:
                self._core.full_state.write(self._managed, key, value)

    def __delitem__(self, key: str) -> None:
        raise ModelError(f"the state {key!r} of {self._managed.name!r} is stored in chunks and can't be deleted")

    def __iter__(self) -> Iterator[str]:
        counts = () if self._core.config.optimizer.counts_itself or not self._managed.steps else ("step",)
        return iter(dict.fromkeys((*self._managed.optimizer_extra, *counts, *self._kinds)))

    def __len__(self) -> int:
        return len([*self])


class OptimizerState(Mapping[Any, ParamStates]):
    """States by parameter; empty for a parameter that was not updated yet."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def __getitem__(self, param: Any) -> ParamStates:
        managed = managed_param_of(param)
        if managed is None:
            raise ModelError("optimizer.state was asked for a tensor that is no parameter of the engine's model")
        return ParamStates(self._core, managed)

    def __iter__(self) -> Iterator[Any]:
        return (managed.param for managed in self._core.shards.managed_params if managed.steps)

    def __len__(self) -> int:
        return sum(managed.steps > 0 for managed in self._core.shards.managed_params)

    def __contains__(self, param: object) -> bool:
        managed = managed_param_of(param)
        return managed is not None and managed.steps > 0
