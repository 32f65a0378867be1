"""Room for one gradient at a time in the master's dtype, while a pass over all gradients runs."""

import torch

from patrickstar.engine.slot import Slot


class Workspace:
    """One buffer per device and dtype, as large as the largest parameter asked for so far.

    A pass that allocated a tensor per parameter would leave the heap in pieces, far larger than its largest tensor.
    """

    def __init__(self, largest_numel: int) -> None:
        self.largest_numel = largest_numel
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def like(self, slot: Slot, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of the parameter's shape and strides; what the last call gave is overwritten with it."""
        key = (device, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.largest_numel, dtype=dtype, device=device)
        return self._buffers[key].as_strided(slot.region.shape, slot.region.strides)
