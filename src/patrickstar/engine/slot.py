"""A slot: one parameter of the user's model and its place in the chunks."""

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from patrickstar.layout.lists import Scheme
from patrickstar.layout.mapping import Place
from patrickstar.memory.chunk import Chunk, Region
from patrickstar.schedule.states import TensorState, check_transition


class Gradient(Enum):
    """Where a parameter's gradient lies until the update takes it."""

    NONE = "none"
    OVER_PARAM = "over the parameter, in its param16 chunk"
    IN_LIST = "in the gradient list"


@dataclass(eq=False)
class Slot:
    """A parameter, its place, and what is going on with it. Identity is the parameter's."""

    name: str
    param: nn.Parameter
    scheme: Scheme
    place: Place
    chunk: Chunk
    region: Region
    embedding: bool = False
    state: TensorState = TensorState.FREE
    uses: int = 0
    gradient: Gradient = Gradient.NONE
    version_before_gradient: int = 0
    steps: int = 0
    device_view: torch.Tensor | None = field(default=None, repr=False)

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

    def in_list(self, chunk: Chunk) -> torch.Tensor:
        """This parameter's part of a parallel chunk, where that one is current."""
        return chunk.current(self.region)
