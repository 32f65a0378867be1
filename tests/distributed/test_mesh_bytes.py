"""Model data and sent bytes of tensor- and expert-parallel models follow the formulas, to the byte."""

import pytest
import torch
from laws.models import Waves
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine

from . import ranks

CPU = torch.device("cpu")
LAYERS, WIDTH = 4, 64
CHUNK_BYTES = 2 * WIDTH * WIDTH


class Layer(nn.Module):
    """Matrix that all processes have, and one that DTensors divide by rows, without padding in chunks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)
        whole = torch.randn(2 * WIDTH, WIDTH) / WIDTH
        self.divided = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        local = self.divided.to_local()
        hidden = hidden + (hidden @ self.plain.t()) @ self.plain
        return hidden + (hidden @ local.t()) @ local


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(mesh) for _ in range(LAYERS)))


def count_bytes(tp: int, fits: bool) -> None:
    """Count the bytes of a step; runs in each of four processes. `tp`: 2 for tensor parallelism, 1 for experts."""
    ps.join()
    world = World(CPU)
    grid = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    divided_over = grid["tp"] if tp > 1 else init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    # A group of chunks is one matrix, or the process's part of several.
    config = ps.Config(device="cpu", precision="bf16", chunk_size=CHUNK_BYTES)
    engine = Engine(lambda: build(divided_over), config, meter=testing.NoMeter(), world=world, mesh=grid["dp"])
    batches = engine.data_size
    plain, own = LAYERS * 2 * WIDTH * WIDTH, LAYERS * 2 * WIDTH * WIDTH // divided_over.size()
    shares = 2 if tp == 2 else 1  # processes that hold the same part of a divided matrix
    assert engine.layout.model_data_bytes == 14 * plain // batches + 14 * own // shares
    assert engine.layout.padding_bytes == 0
    group_bytes = max(chunk.compute_bytes for chunk in engine.layout.chunks)
    if not fits:
        engine.close(keep=False)
        config = config.model_copy(update={"device_memory": 2 * group_bytes})
        world = World(CPU)
        engine = Engine(lambda: build(divided_over), config, meter=Waves(0), world=world, mesh=grid["dp"])
    inputs = torch.randn(3, WIDTH)
    for _ in range(4):
        engine.backward(engine(inputs).pow(2).mean())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    last = engine.stats.last
    sent = 2 * plain * (batches - 1) // batches + 2 * own * (shares - 1) // shares
    assert last.reduced_bytes == sent, (last, sent)
    # The last layers of forward are the first of backward, so that some stay.
    assert sent <= last.gathered_bytes <= (1 if fits else 2) * sent, (last, sent)
    assert last.device_peak_model_bytes <= (2 * group_bytes if not fits else 1 << 30)
    engine.close(keep=False)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("tp", [2, 1])
def test_a_step_holds_and_sends_the_bytes_of_the_formula(tp, fits):
    ranks.run(4, count_bytes, tp=tp, fits=fits)
