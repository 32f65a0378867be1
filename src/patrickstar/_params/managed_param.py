"""A slot: one parameter of the user's model and its place in the chunks."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patrickstar._layout.chunk_mapping import ParamLocation
from patrickstar._layout.schema import PARAM16, PARAM32, ParamSchema
from patrickstar._layout.shard_geometry import memory_order
from patrickstar._memory.chunk import Chunk, Region
from patrickstar._schedule.tensor_state import TensorState, check_transition


@dataclass(eq=False)
class ManagedParam:
    """A parameter, its place, and what is going on with it. Identity is the parameter's.

    `chunk` and `region` say where operators find it. `own` and `place` say where the part lies that this process has
    in its lists: all of it, and in the same chunk, unless there are several processes. That part begins at element
    `first` of the parameter.
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
    """Only embedding lookups read it, and its chunk is its own."""
    on_host: bool = False
    """Lookups run on the host, where the weight stays."""
    lookup_bytes: int = 0
    """What lookups that are differentiated put out since the last step."""
    lookups_in_graph_bytes: int = 0
    """The same, since the last gradient came."""
    state: TensorState = TensorState.FREE
    uses: int = 0
    overlays_param: bool = False
    """A gradient lies over the parameter, in its `param16` chunk."""
    reduced: bool = False
    """With several processes: the sum of their gradients lies over this one's part."""
    gradient_ready: bool = False
    """With several processes: a gradient has come since the last step, here or, once they have met, anywhere."""
    reducing: bool = False
    """With several processes: a gradient lay over the parameter, and has left for its owners."""
    in_grad_list: bool = False
    """Earlier gradients of this step are summed in the gradient list."""
    partial_grad: torch.Tensor | None = None
    """A gradient of the running backward that had to make way, and that more may come to."""
    backward_id: int = 0
    """The number of the backward that the gradient over the parameter is of."""
    observed: bool = False
    """This engine has watched it through a step."""
    may_grow: bool = False
    """A backward has added to its gradient after that had come, or has read the parameter again."""
    updated_in_backward: int = 0
    """The number of the backward that it was updated beside."""
    update_pending: bool = False
    """Its update has been asked for, with the gradient that lies over it, and has not ended."""
    version_before_gradient: int = 0
    steps: int = 0
    """How many updates it has had."""
    optimizer_extra: dict[str, Any] = field(default_factory=dict, repr=False)
    """What its optimizer keeps beside the chunk lists: numbers, such as a count of its own."""
    device_view: torch.Tensor | None = field(default=None, repr=False)

    @property
    def stays_on_host(self) -> bool:
        """Whether an access finds the parameter on the host, and leaves it there."""
        return self.on_host and self.chunk.host_valid and not self.chunk.device_valid

    @property
    def has_gradient(self) -> bool:
        """Whether the next step has something to do here."""
        return (self.overlays_shard or self.in_grad_list) and not self.update_pending

    @property
    def overlays_shard(self) -> bool:
        """Whether a gradient that the update can take lies over this process's part."""
        return self.reduced if self.chunk.sharded else self.overlays_param

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def full_kind(self) -> str:
        """The list that has it in full precision: its master's, or the only one if it is frozen."""
        return PARAM32 if self.schema.trained else PARAM16

    @property
    def full_dtype(self) -> torch.dtype:
        """What it is made of there."""
        dtype: torch.dtype = getattr(torch, self.schema.master_dtype) if self.schema.trained else self.chunk.dtype
        return dtype

    @property
    def row_major(self) -> bool:
        """Whether its elements lie in memory in the order of its shape, the last dimension fastest."""
        return memory_order(self.shape, self.region.strides) == tuple(range(len(self.shape)))

    @property
    def shard_slice(self) -> slice:
        """Which of them this process has in its lists."""
        return slice(self.shard_start, self.shard_start + self.location.numel)

    def move_to(self, state: TensorState) -> None:
        """Change state, along legal transitions only."""
        if state is not self.state:
            check_transition(self.name, self.state, state)
            self.state = state

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.region.shape

    def payload(self) -> torch.Tensor:
        """The bytes of the parameter (or of the gradient over it), where they are current."""
        return self.chunk.current(self.region)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """This parameter's elements in one of this process's lists, in a row as they lie in memory."""
        return chunk.current(Region(self.location.offset, (self.location.numel,), (1,)))

    def flattened(self, value: torch.Tensor) -> torch.Tensor:
        """A value of the parameter's shape, its elements in a row as the parameter's lie in memory."""
        value = value.expand(self.shape)
        if value.stride() != self.region.strides or value.numel() != self.numel:
            value = torch.empty_strided(self.shape, self.region.strides, dtype=value.dtype, device=value.device).copy_(
                value
            )
        return value.as_strided((self.numel,), (1,))
