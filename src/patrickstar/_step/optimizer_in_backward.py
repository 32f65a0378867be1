"""Optimizer-in-backward: update a chunk once its gradients are complete (PatrickStar §7; ZeRO-Offload §4.1)."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.several_processes import Sharing
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.speculation import Speculation
from patrickstar.errors import TrainingError

# [Note: updating before backward has ended]
# The user must ask for it with `engine.backward(loss, update=True)`: only the user knows that the step follows this
# backward directly, without clipping, another backward or a read of the gradients. Two more conditions must hold: a
# gradient is complete when its hook fires, and no operator reads the parameter again in this backward. Reentrant
# checkpointing guarantees neither. So a parameter is updated in backward only after the engine has traced it through a
# step in which both held, and never again after a step in which one did not. `optimizer.step()` updates the rest. See
# [Note: running updates] for those that are still running when the backward, or the step, returns.


class OptimizerInBackward:
    """Update of chunks during backward, on background threads or between two operators."""

    def __init__(self, sharing: Sharing, optimizer_step: OptimizerStep, speculates: bool = True) -> None:
        self.data = sharing.shards
        self.optimizer_step = optimizer_step
        self.speculation = Speculation(sharing, optimizer_step, speculates)
        """Updates of backwards without `update=True`."""
        self._groups: Mapping[ManagedParam, Mapping[str, Any]] | None = None
        self._hyper_parameters: list[dict[str, Any]] = []
        self._complete: set[int] = set()

    @property
    def active(self) -> bool:
        """True if a backward with `update=True` awaits its optimizer step."""
        return self._groups is not None

    def begin(self, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """Start to update complete chunks, with the current hyper-parameters of the groups."""
        self._groups = groups
        self._hyper_parameters = hyper_parameters(groups.values())

    def check_inactive(self, operation: str) -> None:
        """Raise TrainingError if `operation` is called while an optimizer step must come next."""
        if self.active:
            raise TrainingError(
                f"{operation} is not allowed after engine.backward(loss, update=True), which has already updated "
                f"parameters: call optimizer.step() next, or leave update=True out"
            )

    def on_gradient_ready(self, managed: ManagedParam) -> None:
        """Record a complete gradient; its chunk is complete once all its traced trainable parameters are."""
        if self._groups is None and self.speculation.assumption is None:
            return
        index = managed.location.chunk
        expected = [other for other in self.data.by_chunk[index] if other.observed and other.param.requires_grad]
        if expected and all(self._is_complete(other) for other in expected):
            if self._groups is None:
                self.speculation.add(index)
            else:
                self._complete.add(index)

    def _is_complete(self, managed: ManagedParam) -> bool:
        """Return whether a parameter has its final gradient, from this backward and not from an earlier one."""
        return (
            managed.state.overlays_param
            and managed.state.backward_id == self.data.backward_id
            and managed.observed
            and not managed.state.may_grow
        )

    def progress(self) -> None:
        """Update the complete chunks that no operator uses."""
        if self.speculation.assumption is not None:
            self.speculation.progress()
        if self._groups is None or not self._complete:
            return
        for index in sorted(self._complete):
            managed_params = self.data.by_chunk[index]
            chunk = managed_params[0].chunk
            if chunk.pins > chunk.held:
                continue
            self._complete.discard(index)
            complete = [managed for managed in managed_params if self._is_complete(managed)]
            if chunk.held:
                self.data.manager.cache.withdraw_hold(chunk)
            groups = {managed: self._groups.get(managed) for managed in complete}
            self.optimizer_step.update_chunk(index, groups.get, (), first=True)
            for managed in complete:
                managed.state.updated_in_backward = self.data.backward_id

    def finish(self, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """End at the step. Raises TrainingError if hyper-parameters changed since `begin`."""
        if self._groups is None:
            return
        used = self._hyper_parameters
        self._end()
        if used != hyper_parameters(groups.values()):
            raise TrainingError(
                "hyper-parameters of the optimizer changed between engine.backward(loss, update=True) and "
                "optimizer.step(), but chunks were already updated with the old ones; change them before that backward"
            )

    def cancel(self) -> None:
        """Start no more updates; those that run are kept, except speculative ones."""
        self.speculation.cancel()
        self._end()

    def _end(self) -> None:
        self._groups = None
        self._hyper_parameters, self._complete = [], set()


def hyper_parameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the hyper-parameters of each distinct param group."""
    distinct = {id(group): group for group in groups}
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in distinct.values()
    ]
