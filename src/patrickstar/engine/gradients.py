"""Decisions that need all gradients at once: their norm, and whether one overflowed."""

import torch

from patrickstar.engine.model_data import ModelData
from patrickstar.engine.precision import LossScaler, clip_coefficient
from patrickstar.engine.slot import Slot
from patrickstar.engine.update import Scaling
from patrickstar.engine.workspace import Workspace


class Gradients:
    """The gradients of the step to come, as the update will see them."""

    def __init__(self, data: ModelData, scaler: LossScaler) -> None:
        self.data = data
        self.scaler = scaler
        self._clips: list[torch.Tensor] = []

    @property
    def scaling(self) -> Scaling:
        """What the update multiplies gradients by."""
        return Scaling(self._unscale, tuple(self._clips))

    @property
    def clipped(self) -> bool:
        """Whether the gradients are final: they were clipped, and no more may be added."""
        return bool(self._clips)

    @property
    def _unscale(self) -> float | None:
        return 1.0 / self.scaler.scale if self.scaler.enabled else None

    def clip(self, max_norm: float) -> torch.Tensor:
        """Have the step scale gradients to a global norm of at most `max_norm`; returns the norm before."""
        workspace, scaling = self.data.workspace(), self.scaling
        device = self.data.manager.device
        norms = []
        with torch.no_grad():
            for slot in self.data.slots:
                if slot.has_gradient:
                    grad = scaling.apply(self.data.gradient(slot, workspace))
                    norms.append(torch.linalg.vector_norm(grad).to(device))
            if not norms:
                return torch.zeros((), device=device)
            total, factor = clip_coefficient(norms, max_norm)
            self._clips.append(factor)
        return total

    def read(self, slot: Slot) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in the master's dtype; None if it has none."""
        if not slot.has_gradient:
            return None
        with torch.no_grad():
            return self.scaling.apply(self.data.gradient(slot, Workspace(slot.place.numel)))

    def overflowed(self) -> bool:
        """Whether a gradient of the scaled loss holds an infinity or a NaN."""
        if not self.scaler.enabled:
            return False
        workspace, scaling = self.data.workspace(), self.scaling
        return any(
            not torch.isfinite(scaling.apply(self.data.gradient(slot, workspace))).all()
            for slot in self.data.slots
            if slot.has_gradient
        )

    def drop(self) -> None:
        """Forget them all; parameters that lie under one are put back."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.data.discard_gradients()
        self._clips.clear()
