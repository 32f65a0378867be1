"""Model data and sent bytes of tensor- and expert-parallel models follow the formulas, to the byte."""

import pytest
import torch
from laws.models import Waves
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from toys import inputs, train

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


@pytest.mark.parametrize("tp", [2, 1])
@ranks.in_processes(4)
def test_a_step_holds_and_sends_the_bytes_of_the_formula(tp):
    """`tp`: 2 for tensor parallelism, 1 for experts."""
    grid = ranks.mesh(dp=4 // tp, tp=tp)
    divided_over = grid["tp"] if tp > 1 else ranks.mesh(ep=4)
    plain, own = LAYERS * 2 * WIDTH * WIDTH, LAYERS * 2 * WIDTH * WIDTH // divided_over.size()
    shares = 2 if tp == 2 else 1  # processes that hold the same part of a divided matrix
    # A group of chunks is one matrix, or the process's part of several.
    config = ps.Config(device="cpu", precision="bf16", chunk_size=CHUNK_BYTES)
    limit_bytes = 1 << 30
    for gathers, meter in ((1, testing.NoMeter()), (2, Waves(0))):
        engine = Engine(lambda: build(divided_over), config, meter=meter, world=World(CPU), mesh=grid["dp"])
        batches = engine.data_size
        assert engine.layout.model_data_bytes == 14 * plain // batches + 14 * own // shares
        assert engine.layout.padding_bytes == 0
        train(engine, inputs(4, WIDTH))
        last = engine.stats.last
        sent = 2 * plain * (batches - 1) // batches + 2 * own * (shares - 1) // shares
        assert last.reduced_bytes == sent, (last, sent)
        # The last layers of forward are the first of backward, so that some stay.
        assert sent <= last.gathered_bytes <= gathers * sent, (last, sent)
        assert last.device_peak_model_bytes <= limit_bytes
        limit_bytes = 2 * max(chunk.compute_bytes for chunk in engine.layout.chunks)
        config = config.model_copy(update={"device_memory": limit_bytes})
        engine.close(keep=False)
