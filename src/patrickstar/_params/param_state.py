"""State of a parameter's payload and of its gradient, from backward to the update (PatrickStar §6.2, Figure 7)."""

from dataclasses import dataclass, field

import torch

from patrickstar._schedule.tensor_state import TensorState
from patrickstar.errors import TrainingError

# [Note: life of a gradient]
# A gradient is written over its parameter (`overlay`), which then is in the state HOLD_AFTER_BWD. If the parameter is
# read again, the gradient is moved out first: into the gradient list, or, while its backward runs, to `partial`, since
# it may still grow. With several processes the gradients of a gathered chunk are submitted together (`submit`), and
# their sum replaces the shard (`reduced`). It ends with an update or when it is discarded. Parts of it may be in
# several places at once, so each place has its own mark.


@dataclass(eq=False, slots=True)
class ParamState:
    """State of one parameter; see [Note: life of a gradient]."""

    name: str
    """Name of the parameter, for errors."""
    uses: int = 0
    """Operators and windows that use the parameter."""
    hold: TensorState = TensorState.FREE
    """State of the payload while nothing uses it and it is no gradient."""
    overlays_param: bool = False
    """True if a gradient is stored in place of the parameter, in its `param16` chunk."""
    reducing: bool = False
    """With several processes: True if the gradient was moved out of the gathered chunk, to be reduced."""
    reduced: bool = False
    """With several processes: True if the reduced gradient is stored in place of this rank's shard."""
    ready: bool = False
    """With several processes: True if this rank (after synchronization: any rank) has a gradient for the next step."""
    accumulated: bool = False
    """True if earlier gradients of this step are accumulated in the gradient list."""
    partial: torch.Tensor | None = field(default=None, repr=False)
    """Gradient of the running backward that was moved out of the chunk and may still grow."""
    may_grow: bool = False
    """True if a backward added to a gradient that seemed complete, or read the parameter after that."""
    backward_id: int = 0
    """Number of the backward that computed the gradient stored in place of the parameter."""
    version_before: int = 0
    """Version counter of the parameter before the gradient was written over it."""
    updated_in_backward: int = 0
    """Number of the backward during which the parameter was updated."""
    update_pending: bool = False
    """True while a deferred update of the parameter, which consumes its gradient, is unfinished."""
    late: bool = False
    """True while a delayed or lock-free update of the parameter is to be made, or has computed values that operators do
    not read yet."""
    listed_in: int = 0
    """Number of the backward that added its gradient to the gradient list without storing it in the place."""
    expected_reads: int = 0
    """Windows of an untraced iteration that backward will open on the parameter."""

    @property
    def tensor(self) -> TensorState:
        """Tensor state: use of the payload, which follows from what is in it (PatrickStar §6.2)."""
        if self.uses:
            return TensorState.COMPUTE
        return TensorState.HOLD_AFTER_BWD if self.overlays_param else self.hold

    @property
    def has_any_gradient(self) -> bool:
        """True if a gradient of the parameter exists in any place or stage of reduction."""
        marks = self.overlays_param or self.accumulated or self.reduced or self.ready or self.reducing
        return marks or self.partial is not None

    def is_listed(self, backward_id: int) -> bool:
        """Return whether the gradient of a backward is in the gradient list."""
        return self.accumulated and self.listed_in == backward_id

    # The payload

    def begin_use(self) -> None:
        """An operator or window uses the parameter. Raises TrainingError if there is none to read."""
        if self.overlays_param or self.hold is TensorState.FREE:
            raise TrainingError(f"parameter {self.name!r} can't change from state {self.tensor.name} to COMPUTE")
        self.uses += 1

    def end_use(self, hold: TensorState) -> None:
        """End one use; after the last one the state is `hold`, or HOLD_AFTER_BWD with a gradient."""
        self.uses -= 1
        self.hold = hold

    def end_all_uses(self) -> None:
        """End all uses after an exception."""
        if self.uses:
            self.uses, self.hold = 0, TensorState.HOLD

    def end_forward(self) -> None:
        """The forward that used the parameter has ended."""
        if self.hold is TensorState.HOLD_AFTER_FWD:
            self.hold = TensorState.HOLD

    # Its gradient

    def overlay(self, backward_id: int, version_before: int) -> None:
        """The gradient of a backward was written over the parameter, or added to the one there."""
        if self.overlays_param:
            self.may_grow = True
        elif not self.reducing:
            self.version_before = version_before
        self.overlays_param, self.backward_id = True, backward_id

    def remove_overlay(self) -> None:
        """The gradient is no longer in the parameter's place."""
        self.overlays_param, self.hold = False, TensorState.HOLD

    def submit(self) -> None:
        """The gradient leaves the gathered chunk for its reduction, and the chunk is gathered again at the next use."""
        self.reducing = True
        self.remove_overlay()

    def keep_partial(self, gradient: torch.Tensor) -> None:
        """Keep a gradient of the running backward, moved out of the chunk, until that backward ends."""
        self.partial, self.may_grow = gradient, True

    def discard_moved(self) -> None:
        """Discard the parts of the gradient that are not in the parameter's place."""
        self.reduced = self.accumulated = self.ready = False
        self.partial = None

    def consume(self) -> None:
        """The gradient was consumed by an update, or given up after a failed one."""
        self.remove_overlay()
        self.reduced = self.accumulated = self.update_pending = self.late = False
        self.partial = None

    def end_late(self, version: int) -> None:
        """Operators read the newest values again.

        `version`: of the parameter, if its gradient is in its place; when it is restored, its bits have changed.
        """
        self.late, self.version_before = False, version + 1
