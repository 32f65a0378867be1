"""`optimizer.state`: the states of each parameter that has been updated."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from patrickstar._engine.core import EngineCore
from patrickstar._params.tensor_subclass import managed_param_of


class OptimizerState(Mapping[Any, Mapping[str, Any]]):
    """Read-only mapping from parameters to their states by name. Tensors can be written in place."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def __getitem__(self, param: Any) -> Mapping[str, Any]:
        managed, options = managed_param_of(param), self._core.config.optimizer
        if managed is None or not managed.steps:
            return MappingProxyType({})
        count = {} if options.counts_itself else {"step": torch.tensor(float(managed.steps), device="cpu")}
        tensors = {kind: self._core.lazy_state.tensor(managed, kind) for kind in options.states}
        return MappingProxyType(managed.optimizer_extra | count | tensors)

    def __iter__(self) -> Iterator[Any]:
        return (managed.param for managed in self._core.data.managed_params if managed.steps)

    def __len__(self) -> int:
        return sum(managed.steps > 0 for managed in self._core.data.managed_params)

    def __contains__(self, param: object) -> bool:
        managed = managed_param_of(param)
        return managed is not None and managed.steps > 0
