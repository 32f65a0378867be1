"""The update beside backward: a chunk is updated as soon as its gradients are there (§7; ZeRO-Offload §4.1)."""

import copy
from collections.abc import Mapping
from typing import Any

from patrickstar._kernels.cpp_backend import Running
from patrickstar._memory.chunk import Chunk
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar.errors import TrainingError

# [Note: updating before backward has ended]
# It needs the user's word, `engine.backward(loss, update=True)`: only they know that nothing comes between this
# backward and the step, neither clipping nor another backward nor a look at the gradients. It also needs to know that
# a gradient is complete when it comes, and that nobody reads the parameter again in this backward. Under reentrant
# checkpointing neither is sure. So a parameter is updated early only after this engine has watched it through a step
# and seen both, and never again once it has seen otherwise. What is not updated early is updated by `optimizer.step()`.
# When the backward returns, nothing is at work any more.


class OptimizerInBackward:
    """Updates chunks while backward goes on, between `begin` and `finish`; `beside` it, or between two operators."""

    def __init__(self, data: ModelData, update: OptimizerStep) -> None:
        self.data = data
        self.optimizer_step = update
        # Where operators run on a CPU, they and the update would fight over its cores.
        self.in_background = data.manager.hardware.has_gpu
        self._groups: Mapping[ManagedParam, Mapping[str, Any]] | None = None
        self._step_promised: list[dict[str, Any]] = []
        self._complete: set[int] = set()
        self._running: list[tuple[Running, Chunk]] = []

    @property
    def active(self) -> bool:
        """Whether a backward was promised a step, which has not come yet."""
        return self._groups is not None

    def begin(self, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """From now on update chunks that are complete, with the hyper-parameters that the groups have now."""
        self._groups = groups
        self._step_promised = _hyper_parameters(groups)

    def check_inactive(self, what: str) -> None:
        """Raise TrainingError if a step was promised, and `what` comes instead."""
        if self.active:
            raise TrainingError(
                f"{what} comes after engine.backward(loss, update=True), which has updated parameters already: call "
                f"optimizer.step() next, or leave update=True out"
            )

    def on_gradient_ready(self, managed: ManagedParam) -> None:
        """A parameter's gradient is complete. Its chunk is when all are that have had updates before."""
        if self._groups is None:
            return
        index = managed.location.chunk
        expected = [one for one in self.data.by_chunk[index] if one.observed and one.param.requires_grad]
        if expected and all(self._is_complete(one) for one in expected):
            self._complete.add(index)

    def _is_complete(self, managed: ManagedParam) -> bool:
        """Whether a gradient has come that will not grow. One of an earlier backward says nothing of this one."""
        return (
            managed.overlays_param
            and managed.backward_id == self.data.backward_id
            and managed.observed
            and not managed.may_grow
        )

    def progress(self) -> None:
        """Update complete chunks that no operator is using."""
        if self._groups is None or not self._complete:
            return
        for index in sorted(self._complete):
            managed_params = self.data.by_chunk[index]
            if managed_params[0].chunk.pins:
                continue
            self.wait()  # chunks change places for the next one, and those at work must not
            self._complete.discard(index)
            known = [managed for managed in managed_params if self._is_complete(managed)]
            groups = {managed: self._groups.get(managed) for managed in known}
            for running in self.optimizer_step.update_chunk(index, groups.get, ()):
                managed_params[0].chunk.pins += 1
                self.data.manager.host_tier.busy += 1
                self._running.append((running, managed_params[0].chunk))
            for managed in known:
                managed.updated_in_backward = self.data.backward_id
            if not self.in_background or len(known) < len(managed_params):  # the others may be read at any time
                self.wait()

    def finish(self, groups: Mapping[ManagedParam, Mapping[str, Any]]) -> None:
        """The step has come: wait for what was begun. Raises TrainingError if it asks for something else."""
        if self._groups is None:
            return
        promised = self._step_promised
        self.cancel()
        if promised != _hyper_parameters(groups):
            raise TrainingError(
                "hyper-parameters of the optimizer changed between engine.backward(loss, update=True) and "
                "optimizer.step(), when chunks were already updated with the old ones; change them before that backward"
            )

    def cancel(self) -> None:
        """Nothing more is updated early; what was, stays."""
        self.wait()
        self._groups = None
        self._step_promised, self._complete = [], set()

    def wait(self) -> None:
        """Nothing is at work when this returns."""
        for running, chunk in self._running:
            running.finish()
            chunk.pins -= 1
            self.data.manager.host_tier.busy -= 1
        self._running.clear()


def _hyper_parameters(groups: Mapping[ManagedParam, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the param groups say, apart from whose they are."""
    distinct = {id(group): group for group in groups.values()}
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in distinct.values()
    ]
