"""Habits of PyTorch users with parameters that are DTensors: copies, pickles, whole values, conversions, buffers."""

import copy
import io
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import train

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine
from patrickstar.errors import ModelError

from . import ranks

WIDTH = 32


class Net(nn.Module):
    """Tensor-parallel layers after a norm, whose plain parameters its forward wraps; the buffer differs per process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.register_buffer("head", torch.tensor([float(mesh.get_local_rank())]), persistent=False)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def __deepcopy__(self, memo: dict[int, object]) -> "Net":
        copied = object.__new__(Net)
        memo[id(self)] = copied
        copied.__dict__ = {key: self.mesh if key == "mesh" else copy.deepcopy(v, memo) for key, v in vars(self).items()}
        return copied

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wrapped = [DTensor.from_local(each, self.mesh, [Replicate()]) for each in (inputs, *self.norm.parameters())]
        hidden = nn.functional.layer_norm(wrapped[0], (WIDTH,), wrapped[1], wrapped[2]).to_local()
        return self.down(torch.relu(self.up(hidden))).pow(2).sum()


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return Net(mesh)


@ranks.in_processes(4)
def test_habits_with_dtensors():
    grid, rank = ranks.mesh(dp=2, tp=2), dist.get_rank()
    config = ps.Config(device="cpu", precision="bf16", chunk_size=512, optimizer=ps.AdamW(lr=1e-2))
    extreme = {"evict_everything": True, "poison": True, "meter": testing.NoMeter()}
    engine = Engine(lambda: build(grid["tp"]), config, world=World(torch.device("cpu")), mesh=grid["dp"], **extreme)
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(engine.data_rank)).bfloat16()
    assert torch.isfinite(torch.stack(train(engine, [(inputs,)] * 2))).all()
    module, whole = engine.module, engine.state_dict()
    assert module.head.item() == rank % 2, "processes keep buffers of their own"

    up = copy.deepcopy(module).up.weight
    assert type(up) is DTensor
    file = io.BytesIO()
    torch.save(module.up.weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (up, loaded):
        testing.assert_same_bits([whole["up.weight"]], [each.detach().full_tensor()], "a copy")
    assert "nan" not in repr(module.up.weight) and "'up.weight'" in repr(module.up.weight)

    changed = {name: value.clone() + 1 for name, value in module.state_dict().items()}
    module.load_state_dict(changed)
    testing.assert_same_bits({name: value + 1 for name, value in whole.items()}, engine.state_dict(), "loaded values")
    with torch.no_grad():
        module.up.weight.data = module.up.weight.data * 0.5
        gathered = module.up.weight.redistribute(placements=[Replicate()], async_op=True)
        engine(inputs)
        assert torch.isfinite(gathered.to_local()).all()
    module.up.float()
    with pytest.raises(ModelError, match=r"parameter 'up\.weight' was replaced or added"):
        engine(inputs)
    engine.close()
    assert torch.isfinite(module.down.weight.full_tensor()).all()


@pytest.mark.slow
@ranks.in_processes(2)
def test_a_slow_write_in_one_process_is_no_deadlock(tmp_path):
    """Save by torch.distributed.checkpoint in one process, while the other waits for it."""
    torch.manual_seed(0)
    engine, _ = ps.initialize(nn.Linear(8, 8), ps.Config(device="cpu", precision="fp32"))
    if dist.get_rank() == 0:
        with mock.patch("os.fsync", lambda _: time.sleep(14)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a save of a single process
            dcp.save({"x": torch.zeros(4)}, checkpoint_id=Path(tmp_path) / "one", no_dist=True)
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.optimizer.step()
