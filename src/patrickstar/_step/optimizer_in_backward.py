"""Optimizer-in-backward: update a chunk once its gradients are complete (PatrickStar §7; ZeRO-Offload §4.1)."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.several_processes import Sharing
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.speculation import Speculation
from patrickstar._step.used_gradients import UsedGradients
from patrickstar.errors import TrainingError

# [Note: updating before backward has ended]
# The user must ask for it with `engine.backward(loss, update=True)`, or for all backwards with `ps.InBackward()`: only
# the user knows that the step follows this backward directly, without clipping, another backward or a read of the
# gradients. Two more conditions must hold: a gradient is complete when its hook fires, and no operator reads the
# parameter again in this backward. Reentrant checkpointing guarantees neither. So a parameter is updated in backward
# only after the engine has traced it through a step in which both held, and never again after a step in which one did
# not. `optimizer.step()` updates the rest. See [Note: running updates] for those that are still running when the
# backward, or the step, returns.
#
# With `ps.InBackward()` the first step has to do without all gradients at once, too. In it a parameter is updated once
# backward has opened every window that the forward has prepared for it, and if no operator has read it without grad,
# as those within reentrant checkpointing do.


class OptimizerInBackward:
    """Update of chunks during backward, on background threads or between two operators."""

    def __init__(
        self,
        sharing: Sharing,
        optimizer_step: OptimizerStep,
        speculates: bool = True,
        always: bool = False,
        gradient_room_bytes: int = 0,
    ) -> None:
        self.data = sharing.shards
        self.always = always
        """True if every backward updates chunks: `ps.InBackward()`."""
        self.first = always
        """True in an iteration of such an engine that is the first of all, or since states were loaded."""
        self.optimizer_step = optimizer_step
        self.used_gradients = UsedGradients(sharing.shards, gradient_room_bytes)
        self.speculation = Speculation(sharing, optimizer_step, speculates and optimizer_step.lock_free is None)
        """Updates of backwards without `update=True`. Spare memory has no place for the buffer of newest values."""
        self._groups: Mapping[ManagedParam, Mapping[str, Any]] | None = None
        self._hyper_parameters: list[dict[str, Any]] = []
        self._complete: set[int] = set()

    @property
    def option(self) -> str:
        """The option by which updates in backward were asked for, as errors name it."""
        return "update=ps.InBackward()" if self.always else "update=True"

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
            call = "engine.backward(loss)" if self.always else "engine.backward(loss, update=True)"
            raise TrainingError(
                f"{operation} is not allowed after {call}, which has already updated parameters: call "
                f"optimizer.step() next, or leave {self.option} out"
            )

    def on_gradient_ready(self, managed: ManagedParam) -> None:
        """Record a complete gradient; its chunk is complete once all its traced trainable parameters are."""
        if self._groups is None and self.speculation.assumption is None:
            return
        index = managed.location.chunk
        trained = [other for other in self.data.by_chunk[index] if other.param.requires_grad]
        expected = [other for other in trained if (other.location.numel if self.first else other.observed)]
        if expected and all(self._is_complete(other) for other in expected):
            if self._groups is None:
                self.speculation.add(index)
            else:
                self._complete.add(index)

    def _is_complete(self, managed: ManagedParam) -> bool:
        """Return whether a parameter has its final gradient, from this backward and not from an earlier one."""
        state, number = managed.state, self.data.backward_id
        in_place = state.overlays_param and state.backward_id == number
        complete = state.is_listed(number) if managed.schema.gradients_beside else in_place
        known = not state.expected_reads if self.first else managed.observed
        return complete and known and not state.may_grow

    def progress(self) -> None:
        """Update the complete chunks that no operator uses."""
        if self.speculation.assumption is not None:
            self.speculation.progress()
        groups = self._groups
        if groups is None or not self._complete:
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
            of_complete = {managed: groups.get(managed) for managed in complete}
            self.optimizer_step.update_chunk(index, of_complete.get, (), first=True)
            for managed in complete:
                managed.state.updated_in_backward = self.data.backward_id
            if managed_params[0].schema.gradients_beside:
                self.used_gradients.add(index)

    def finish(self, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """End at the step. Raises TrainingError if hyper-parameters changed since `begin`."""
        if self._groups is None:
            return
        used = self._hyper_parameters
        self._end()
        self.begin_again()
        self.first = False
        if used != hyper_parameters(groups.values()):
            raise TrainingError(
                "hyper-parameters of the optimizer changed between engine.backward, which updates, and "
                "optimizer.step(), but chunks were already updated with the old ones; change them before that backward"
            )

    def cancel(self) -> None:
        """Start no more updates; those that run are kept, except speculative ones."""
        self.speculation.cancel()
        self._end()

    def expect_reads(self, managed_params: Iterable[ManagedParam]) -> None:
        """Note, in a first iteration, that backward will read parameters."""
        for managed in managed_params:
            managed.state.expected_reads += 1

    def note_reads(self, managed_params: Iterable[ManagedParam]) -> None:
        """Note that backward reads parameters as expected."""
        for managed in managed_params:
            managed.state.expected_reads -= 1

    def begin_again(self) -> None:
        """Observe the next iteration as a first one, if every backward updates chunks."""
        self.first = self.always
        for managed in self.data.managed_params:
            managed.state.expected_reads = 0

    def _end(self) -> None:
        self._groups = None
        self._hyper_parameters, self._complete = [], set()


def hyper_parameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the hyper-parameters of each distinct param group."""
    distinct = {id(group): group for group in groups}
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in distinct.values()
    ]
