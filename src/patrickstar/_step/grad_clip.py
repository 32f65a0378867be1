"""Decisions that need all gradients at once: their norm, and whether one overflowed."""

import torch

from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.grad_norm import GradStats, grad_stats_of_parts
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.precision import LossScaler, clip_coefficient
from patrickstar._schedule.coordination import Request


class Gradients:
    """The gradients of the step to come, as the update will see them."""

    def __init__(self, data: ModelData, scaler: LossScaler, kernels: Kernels) -> None:
        self.data = data
        self.scaler = scaler
        self.kernels = kernels
        self._clips: list[float] = []
        self._grad_stats: GradStats | None = None

    @property
    def scales(self) -> tuple[float, ...]:
        """What the update multiplies gradients by, one factor after the other, each product rounded."""
        average = (1.0 / self.data.comm.world.size,) if self.data.comm is not None else ()
        unscale = (1.0 / self.scaler.scale,) if self.scaler.enabled else ()
        return (*average, *unscale, *self._clips)

    @property
    def clipped(self) -> bool:
        """Whether the gradients are final: they were clipped, and no more may be added."""
        return bool(self._clips)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Have the step scale gradients to a global norm of at most `max_norm`; returns the norm before."""
        self.data.synchronize_gradients(Request.NORM)
        with self.data.collective_section():
            self._grad_stats = self._look()
        total, factor = clip_coefficient(self._grad_stats.norm, max_norm)
        if self._grad_stats.squares:
            self._clips.append(factor)
        return torch.tensor(total, dtype=torch.float32, device=self.data.manager.device)

    def read(self, managed: ManagedParam) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in the master's dtype; None if it has none."""
        if not self.data.has_gradient(managed):
            return None
        with torch.no_grad():
            grad = torch.empty(managed.numel, dtype=getattr(torch, managed.schema.master_dtype), device="cpu")
            if managed.has_gradient:
                self._read_own(managed, grad[managed.shard_slice])
            self.data.gather_parts(managed, grad)
            return grad.as_strided(managed.region.shape, managed.region.strides).to(self.data.manager.device)

    def _read_own(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        self.data.ensure_local(managed)
        if not self.data.gradient_on_disk(managed):
            grad.copy_(self.data.gradient(managed).together().scaled(self.scales))
            return
        for where, part in self.data.gradient_parts(managed):
            grad[where] = part.together().scaled(self.scales)

    def overflowed(self) -> bool:
        """Whether a gradient of the scaled loss holds an infinity or a NaN; where it was clipped, that is known."""
        if not self.scaler.enabled:
            return False
        with self.data.collective_section():
            grad_stats = self._grad_stats if self._grad_stats is not None else self._look()
        return grad_stats.not_finite > 0

    def drop(self) -> None:
        """Forget them all; parameters that lie under one are put back."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.data.discard_gradients()
        self._clips.clear()
        self._grad_stats = None

    def _look(self) -> GradStats:
        """Chunk by chunk, so that of what has to be copied between tiers no more than that is there at a time."""
        sums: dict[ManagedParam, float] = {}
        not_finite = 0
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for managed_params in self.data.by_chunk.values():
                some = [managed for managed in managed_params if managed.has_gradient]
                for managed in some:
                    self.data.ensure_local(managed)
                on_disk = [managed for managed in some if self.data.gradient_on_disk(managed)]
                here = [managed for managed in some if managed not in on_disk]
                found = self.kernels.grad_stats(
                    [self.data.gradient(managed).together() for managed in here], self.scales
                )
                sums.update(zip(here, found.squares, strict=True))
                not_finite += found.not_finite
                for managed in on_disk:
                    parts = (part.together().scaled(self.scales) for _, part in self.data.gradient_parts(managed))
                    one = grad_stats_of_parts(parts)
                    sums[managed] = one.squares[0]
                    not_finite += one.not_finite
        return GradStats(*self.data.all_sums(sums, not_finite))
