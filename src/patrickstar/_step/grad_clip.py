"""Decisions that need all gradients at once: their norm, and whether one overflowed."""

import torch

from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.grad_norm import Survey, survey_of_parts
from patrickstar._params.managed_param import Slot
from patrickstar._params.model_data import ModelData
from patrickstar._params.precision import LossScaler, clip_coefficient
from patrickstar._schedule.coordination import Want


class Gradients:
    """The gradients of the step to come, as the update will see them."""

    def __init__(self, data: ModelData, scaler: LossScaler, kernels: Kernels) -> None:
        self.data = data
        self.scaler = scaler
        self.kernels = kernels
        self._clips: list[float] = []
        self._survey: Survey | None = None

    @property
    def scales(self) -> tuple[float, ...]:
        """What the update multiplies gradients by, one factor after the other, each product rounded."""
        average = (1.0 / self.data.peers.world.size,) if self.data.peers is not None else ()
        unscale = (1.0 / self.scaler.scale,) if self.scaler.enabled else ()
        return (*average, *unscale, *self._clips)

    @property
    def clipped(self) -> bool:
        """Whether the gradients are final: they were clipped, and no more may be added."""
        return bool(self._clips)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Have the step scale gradients to a global norm of at most `max_norm`; returns the norm before."""
        self.data.meet_gradients(Want.NORM)
        with self.data.together():
            self._survey = self._look()
        total, factor = clip_coefficient(self._survey.norm, max_norm)
        if self._survey.sums:
            self._clips.append(factor)
        return torch.tensor(total, dtype=torch.float32, device=self.data.manager.device)

    def read(self, slot: Slot) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in the master's dtype; None if it has none."""
        if not self.data.has_gradient(slot):
            return None
        with torch.no_grad():
            grad = torch.empty(slot.numel, dtype=getattr(torch, slot.scheme.master_dtype), device="cpu")
            if slot.has_gradient:
                self._read_own(slot, grad[slot.part])
            self.data.complete_parts(slot, grad)
            return grad.as_strided(slot.region.shape, slot.region.strides).to(self.data.manager.device)

    def _read_own(self, slot: Slot, grad: torch.Tensor) -> None:
        self.data.have_own(slot)
        if not self.data.gradient_on_disk(slot):
            grad.copy_(self.data.gradient(slot).together().scaled(self.scales))
            return
        for where, part in self.data.gradient_parts(slot):
            grad[where] = part.together().scaled(self.scales)

    def overflowed(self) -> bool:
        """Whether a gradient of the scaled loss holds an infinity or a NaN; where it was clipped, that is known."""
        if not self.scaler.enabled:
            return False
        with self.data.together():
            survey = self._survey if self._survey is not None else self._look()
        return survey.not_finite > 0

    def drop(self) -> None:
        """Forget them all; parameters that lie under one are put back."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.data.discard_gradients()
        self._clips.clear()
        self._survey = None

    def _look(self) -> Survey:
        """Chunk by chunk, so that of what has to be copied between tiers no more than that is there at a time."""
        sums: dict[Slot, float] = {}
        not_finite = 0
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for slots in self.data.by_chunk.values():
                some = [slot for slot in slots if slot.has_gradient]
                for slot in some:
                    self.data.have_own(slot)
                on_disk = [slot for slot in some if self.data.gradient_on_disk(slot)]
                here = [slot for slot in some if slot not in on_disk]
                found = self.kernels.survey([self.data.gradient(slot).together() for slot in here], self.scales)
                sums.update(zip(here, found.sums, strict=True))
                not_finite += found.not_finite
                for slot in on_disk:
                    parts = (part.together().scaled(self.scales) for _, part in self.data.gradient_parts(slot))
                    one = survey_of_parts(parts)
                    sums[slot] = one.sums[0]
                    not_finite += one.not_finite
        return Survey(*self.data.all_sums(sums, not_finite))
