"""Parameters and optimizer states in full precision, one at a time, after all updates."""

import torch

from patrickstar._hardware.sigint_gate import deferring_sigint
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.state_dict import ModelState
from patrickstar._schedule.coordination import Request
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar.errors import TrainingError


class FullState:
    """Reads and replaces one parameter or state. With several processes each call is collective."""

    def __init__(self, state: ModelState, optimizer_step: OptimizerStep) -> None:
        self.state, self.shards, self.sharing = state, state.shards, state.sharing
        self._optimizer_step = optimizer_step
        self.writes = 0
        """Number of calls of `write`."""

    def read(self, managed: ManagedParam, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a host copy of a parameter in a chunk list, in `out` if given, which has the parameter's strides.

        A closed engine has left its parameters, but no states.

        Raises:
            TrainingError: The engine is closed.
        """
        if self.shards.closed and kind == managed.full_kind and self.state.keep_values:
            left = managed.param.detach().cpu()
            return left.clone() if out is None else out.copy_(left)
        self._check_open(managed)
        with deferring_sigint(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._optimizer_step.complete()
            self.sharing.synchronize_processes(Request.STATE)
            with self.sharing.collective_section():
                return self.state.read(managed, kind, out)

    def write(self, managed: ManagedParam, kind: str, value: torch.Tensor) -> None:
        """Replace a parameter, and the rounded copy that operators read, or one of its states.

        Raises:
            TrainingError: As `read`.
        """
        self._check_open(managed)
        self.writes += 1
        with deferring_sigint(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._optimizer_step.complete()
            self.sharing.synchronize_processes(Request.WRITE)
            self._optimizer_step.flush()
            self.shards.before_update(managed.location.chunk)
            if kind == managed.full_kind:
                self.sharing.restore_params((managed,))
                self.state.assign(managed, value)
            else:
                self.state.write(managed, kind, value)
            self.sharing.drop_gathered()

    def follow_write(
        self, managed: ManagedParam, values: torch.Tensor | None = None, before: torch.Tensor | None = None
    ) -> None:
        """Update the master after an in-place write to a parameter by the user.

        Args:
            values: The written values in full precision, if they are known.
            before: With a split master, a copy of the parameter before the write.
        """
        self._optimizer_step.before_write(managed.location.chunk)
        self.sharing.on_in_place_write(managed, values, before)

    def _check_open(self, managed: ManagedParam) -> None:
        if self.shards.closed:
            raise TrainingError(
                f"the engine of parameter {managed.name!r} is closed, and its values are no longer stored: read them "
                f"before engine.close()"
            )
