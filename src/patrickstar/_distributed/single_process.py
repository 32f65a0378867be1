"""A training run of one process, with the interface of a process group."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

_Error = TypeVar("_Error", bound=Exception)
_Value = TypeVar("_Value")


class SingleProcess:
    """The only process of a run; every collective returns at once. Has the interface of `World`."""

    rank = 0
    size = 1
    local_ranks = (0,)
    checkpoints = None

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return own.view(1, -1)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, value: _Value) -> _Value:
        return value

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Do nothing: the tensor already has the values of rank 0."""

    def agree_on_error(self, own: _Error | None, kind: Callable[[str], _Error]) -> _Error | None:
        return own

    def check_agreement(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: there is nobody to disagree with."""

    def abort(self, error: BaseException) -> None:
        """Do nothing: no other process waits for this one."""


SINGLE_PROCESS = SingleProcess()
"""It has no state, so that one object serves all engines."""
