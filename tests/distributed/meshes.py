"""A small model on several meshes: tensor parallelism, experts shared out, packed and transposed DTensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from patrickstar._distributed.process_group import World
from patrickstar._distributed.single_process import SINGLE_PROCESS

from . import ranks

EXPERTS, TOKENS = 6, 11


def local(param: Any, partial: bool = False) -> Tensor:
    """Return the local tensor of a parameter. `partial`: its gradient is a sum over the processes of its mesh."""
    if not isinstance(param, DTensor):
        return param
    return param.to_local(grad_placements=[Partial()] if partial else None)


def part_of(whole: nn.Parameter, part: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a parameter of the shape of another one, of which this process holds a part."""
    shape, stride = whole.shape, whole.stride()
    return nn.Parameter(DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride))


class Gated(nn.Module):
    """Gated layer whose two input matrices are packed into one parameter, and whose output matrix is transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(width, 12) / 4)
        self.turned = nn.Parameter((torch.randn(width, 6) / 4).t())
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        gate, up = (x @ local(self.packed)).chunk(2, -1)
        out = (gate * up) @ local(self.turned)
        return out if self.mesh is None else DTensor.from_local(out, self.mesh, [Partial()]).full_tensor()

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Shard both halves of the packed matrix over a mesh, as transformers' `packed_colwise` does."""
        self.mesh = mesh
        rank, size = mesh.get_local_rank(), mesh.size()
        packed = torch.cat([half.chunk(size, 1)[rank] for half in self.packed.data.chunk(2, 1)], 1)
        turned = self.turned.data.chunk(size)[rank].t().contiguous().t()
        self.packed = part_of(self.packed, packed, mesh, _StridedShard(1, split_factor=2))
        self.turned = part_of(self.turned, turned, mesh, Shard(0))


class Experts(nn.Module):
    """Experts with stacked weights; token n of a sequence goes to expert n modulo their number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 4) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4, width) / 4)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        first = 0
        if self.mesh is not None:
            # Each process computes the tokens of all processes with its own experts.
            x = DTensor.from_local(x, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])
            x = x.to_local(grad_placements=[Partial()])
            first = self.mesh.get_local_rank() * -(-EXPERTS // self.mesh.size())
        up, down = local(self.up), local(self.down)
        out = x * 0
        for number in range(len(up)):
            routed = torch.arange(x.shape[1]) % EXPERTS == first + number
            out = out + routed[:, None] * ((x @ up[number]).relu() @ down[number])
        if self.mesh is None:
            return out
        return DTensor.from_local(out, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Share the experts out over the processes of a mesh, unevenly."""
        self.mesh = mesh
        share = -(-EXPERTS // mesh.size())
        first = min(EXPERTS, mesh.get_local_rank() * share)
        self.up, self.down = (
            part_of(each, each.data[first : first + share].clone(), mesh, Shard(0)) for each in (self.up, self.down)
        )


class Mixed(nn.Module):
    """Model with a layer of every kind, a frozen bias and buffers that depend on the batch."""

    def __init__(self, width: int = 8, tokens: int = TOKENS, frozen: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(tokens, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 22)
        self.down = nn.Linear(22, width)
        self.up.bias.requires_grad_(not frozen)
        self.gated = Gated(width)
        self.experts = Experts(width)
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        hidden = hidden + self.norm(hidden.flatten(0, 1)).view_as(hidden)
        hidden = hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))
        hidden = self.dropout(hidden + self.gated(hidden))
        hidden = hidden + self.experts(hidden)
        return (self.scale * hidden).float().pow(2).mean()


@dataclass
class Place:
    """Processes of a run: the number of processes, the sizes of a mesh, and the meanings of its dimensions."""

    size: int
    dims: dict[str, int]
    """Sizes by name."""
    data: tuple[str, ...]
    """Dimensions over which the data are distributed."""
    tensor: str | None = None
    expert: str | None = None

    def batch(self, rank: int) -> int:
        """Return the number of the batch of a process."""
        return rank // self.dims["tp"] if self.tensor else rank

    @property
    def batches(self) -> int:
        """Number of distinct batches."""
        return self.size // self.dims["tp"] if self.tensor else self.size

    def open(self, **options: Any) -> tuple[Any, Any, Callable[[], nn.Module]]:
        """Return the world, the data-parallel mesh, and a function that builds the model with these options."""
        if self.size == 1:
            return SINGLE_PROCESS, None, lambda: Mixed(**options)
        world = World(torch.device("cpu"))
        mesh = ranks.mesh(**self.dims)

        def build() -> nn.Module:
            model = Mixed(**options)
            if self.tensor:
                words = RowwiseParallel(input_layouts=Replicate())
                plan = {"words": words, "up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(model, mesh[self.tensor], plan)
                model.gated.parallelize(mesh[self.tensor])
            if self.expert:
                model.experts.parallelize(mesh[self.expert])
            return model

        return world, mesh[self.data], build


PLACES = {
    "1": Place(1, {}, ()),
    "2": Place(2, {"dp": 2}, ("dp",)),
    "tp2": Place(2, {"dp": 1, "tp": 2}, ("dp",), "tp"),
    "4": Place(4, {"dp": 4}, ("dp",)),
    "2x2": Place(4, {"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate", "dp_shard")),
    "dp2-tp2": Place(4, {"dp": 2, "tp": 2}, ("dp",), "tp"),
    "ep4": Place(4, {"dp": 4}, ("dp",), expert="dp"),
    "dp2-tp2-ep2": Place(4, {"dp": 2, "tp": 2}, ("dp",), "tp", "dp"),
}
"""Places by name."""
