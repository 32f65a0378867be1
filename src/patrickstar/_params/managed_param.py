"""One parameter of the user's model, its location in the chunks and its training state."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patrickstar._layout.chunk_mapping import ParamLocation
from patrickstar._layout.schema import PARAM16, PARAM32, ParamSchema
from patrickstar._layout.shard_geometry import memory_order
from patrickstar._memory.chunk import Chunk, Region
from patrickstar._memory.profiler_range import is_profiling
from patrickstar._schedule.tensor_state import TensorState, check_transition


@dataclass(eq=False)
class ManagedParam:
    """A managed parameter. Compared by identity.

    Operators read the parameter at `region` of `chunk`. This rank's shard is at `location` in the chunk lists
    (`shard_chunk` for the compute dtype) and starts at element `shard_start` of the parameter. With one process the
    shard is the whole parameter and `shard_chunk` is `chunk`.
    """

    name: str
    param: nn.Parameter
    schema: ParamSchema
    location: ParamLocation
    chunk: Chunk
    region: Region
    shard_chunk: Chunk
    shard_start: int = 0
    embedding: bool = False
    """True if only embedding lookups read the parameter; its chunk holds nothing else."""
    on_host: bool = False
    """True if embedding lookups run on the host, where the weight remains."""
    lookup_bytes: int = 0
    """Output bytes of differentiated lookups since the last step."""
    lookups_in_graph_bytes: int = 0
    """Output bytes of differentiated lookups since the last gradient of the parameter."""
    state: TensorState = TensorState.FREE
    uses: int = 0
    overlays_param: bool = False
    """True if a gradient is stored in place of the parameter, in its `param16` chunk."""
    reduced: bool = False
    """With several processes: True if the reduced gradient is stored in place of this rank's shard."""
    gradient_ready: bool = False
    """With several processes: True if this rank (after synchronization: any rank) has a gradient for the next step."""
    reducing: bool = False
    """With several processes: True if the gradient was moved out of the gathered chunk, to be reduced."""
    in_grad_list: bool = False
    """True if earlier gradients of this step are accumulated in the gradient list."""
    partial_grad: torch.Tensor | None = None
    """Gradient of the running backward that was moved out of the chunk and may still grow."""
    backward_id: int = 0
    """Number of the backward that computed the gradient stored in place of the parameter."""
    observed: bool = False
    """True once this engine has updated the parameter."""
    may_grow: bool = False
    """True if a backward added to a gradient that seemed complete, or read the parameter after that."""
    updated_in_backward: int = 0
    """Number of the backward during which the parameter was updated."""
    update_pending: bool = False
    """True while a deferred update of the parameter, which consumes its gradient, is unfinished."""
    version_before_gradient: int = 0
    steps: int = 0
    """Number of updates."""
    optimizer_extra: dict[str, Any] = field(default_factory=dict, repr=False)
    """Optimizer state outside the chunk lists: scalars, such as a step count."""
    device_view: torch.Tensor | None = field(default=None, repr=False)

    @property
    def stays_on_host(self) -> bool:
        """True if an access reads the parameter on the host, without a transfer."""
        return self.on_host and self.chunk.host_valid and not self.chunk.device_valid

    @property
    def has_gradient(self) -> bool:
        """True if this rank's shard has a gradient for the next step."""
        return (self.overlays_shard or self.in_grad_list) and not self.update_pending

    @property
    def has_any_gradient(self) -> bool:
        """True if a gradient of the parameter exists in any place or stage of reduction."""
        marks = self.overlays_param or self.in_grad_list or self.reduced or self.gradient_ready or self.reducing
        return marks or self.partial_grad is not None

    @property
    def overlays_shard(self) -> bool:
        """True if a gradient that the update can use is stored in place of this rank's shard."""
        return self.reduced if self.chunk.sharded else self.overlays_param

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def full_kind(self) -> str:
        """Chunk list that holds the parameter in full precision: the master list, or `param16` if frozen."""
        return PARAM32 if self.schema.trained else PARAM16

    @property
    def full_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.schema.master_dtype) if self.schema.trained else self.chunk.dtype
        return dtype

    @property
    def row_major(self) -> bool:
        """True if the elements are in row-major order in memory."""
        return memory_order(self.shape, self.region.strides) == tuple(range(len(self.shape)))

    @property
    def shard_slice(self) -> slice:
        """This rank's shard as a slice of the parameter's elements in memory order."""
        return slice(self.shard_start, self.shard_start + self.location.numel)

    def move_to(self, state: TensorState) -> None:
        """Change the tensor state. Raises TrainingError for an illegal transition."""
        if state is not self.state:
            check_transition(self.name, self.state, state)
            self.state = state

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.shape

    def payload(self) -> torch.Tensor:
        """Return the parameter, or the gradient stored in its place, from an up-to-date copy of its chunk."""
        if self.chunk.device_valid and self.chunk.in_memory:
            return self.current_device_view()
        return self.chunk.current(self.region)

    def current_device_view(self) -> torch.Tensor:
        """Return a view of the device copy with its own version counter. See [Note: one storage for life]."""
        if self.device_view is None:
            self.device_view = self.chunk.on_device(self.region)
        return self.device_view

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """Return this rank's elements of the parameter in a chunk of one of its lists, 1-D, in memory order."""
        return chunk.flat(self.location.offset, self.location.numel)

    def flattened(self, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, broadcast to the parameter's shape, as a 1-D tensor in the parameter's memory order."""
        value = value.expand(self.shape)
        if value.stride() != self.region.strides or value.numel() != self.numel:
            value = torch.empty_strided(self.shape, self.region.strides, dtype=value.dtype, device=value.device).copy_(
                value
            )
        return value.as_strided((self.numel,), (1,))


def profiled_names(managed_params: Iterable[ManagedParam]) -> str:
    """Return the names of parameters for a profiler range; empty, to save time, if no profiler runs."""
    return ", ".join(managed.name for managed in managed_params) if is_profiling() else ""
