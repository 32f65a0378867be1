"""Views that keep the user's Parameters pointed at the current memory of their chunks."""

from collections.abc import Iterable

import torch

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.defer_sigint import defer_sigint
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam

# [Note: placeholders of evicted parameters]
# The user's Parameter views its chunk's storage while the chunk is on the device. When the chunk is evicted, the
# Parameter gets a placeholder of the same shape that expands a single NaN. Operators never see it, since they are
# intercepted first; code that bypasses interception (native code given the tensor directly) computes NaN instead of
# reading freed memory.


class ParamViews(LocalShards):
    """Updates `Parameter.data` when chunks move."""

    def __init__(self, manager: ChunkManager) -> None:
        super().__init__(manager)
        self.by_chunk: dict[int, list[ManagedParam]] = {}
        self.closed = False
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}

    @defer_sigint
    def update_param_views(self) -> None:
        """Point the Parameters of moved chunks at their device memory, or at a placeholder after eviction."""
        self.set_param_views(self.manager.drain_moved())

    def set_param_views(self, chunks: Iterable[Chunk]) -> None:
        """Point the Parameters of `chunks` at the current memory of these; do nothing once the engine is closed."""
        for chunk in () if self.closed else chunks:
            for managed in self.by_chunk.get(chunk.index, ()):
                if managed.chunk is chunk:
                    self._set_param_view(managed)

    def _set_param_view(self, managed: ManagedParam) -> None:
        """See [Note: placeholders of evicted parameters]."""
        with torch._C.DisableTorchFunctionSubclass():
            if managed.chunk.device_valid:
                if managed.device_view is None:
                    managed.device_view = managed.chunk.on_device(managed.region)
                managed.param.data = managed.device_view
            elif managed.stays_on_host:
                managed.param.data = managed.chunk.on_host(managed.region)
            else:
                managed.param.data = self.placeholder(managed.chunk.dtype).expand(managed.shape)

    def placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the one-element tensor that evicted parameters expand: NaN, or zero for integers."""
        if dtype not in self._placeholders:
            fill = float("nan") if dtype.is_floating_point else 0
            self._placeholders[dtype] = torch.full((), fill, dtype=dtype, device=self.manager.device)
        return self._placeholders[dtype]
