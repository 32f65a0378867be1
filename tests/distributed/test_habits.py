"""Habits of PyTorch users with several processes: every process makes the same calls, and has the same results.

With plain parameters, and with DTensors: copies, pickles, whole values, conversions, buffers.
"""

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
from habits.registry import batch, build, mean_square
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import train

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar.errors import ModelError, TrainingError
from patrickstar.testing import assert_same_bits

from . import ranks
from .test_exactness import mesh_of


def started(precision: str, replicas: int) -> ps.Engine:
    options = {"precision": precision, "optimizer": ps.EMA(ps.AdamW(lr=1e-2), decay=0.9)}
    engine, _ = ps.initialize(build, ps.Config(device="cpu", chunk_size=1024, **options), mesh=mesh_of(replicas))
    return engine


def backward(engine: ps.Engine, step: int = 0) -> None:
    engine.backward(mean_square(engine(batch(10 * step + engine.world.rank))))


def gradients_of(engine: ps.Engine) -> list[torch.Tensor]:
    return [gradient for name, _ in engine.named_parameters() if (gradient := engine.gradient(name)) is not None]


def same_everywhere(tensors: list[torch.Tensor]) -> None:
    """Assert that all processes have the same bits."""
    flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert_same_bits(others[:1] * len(others), others, "the other process's")


def gradients(precision: str, replicas: int) -> None:
    """Read, clip and write gradients."""
    engine = started(precision, replicas)
    params = list(engine.parameters())
    assert all(p.grad is None for p in params)
    backward(engine)
    assert all(p.grad is not None for p in params)
    assert_same_bits(gradients_of(engine), [p.grad.clone() for p in params], "p.grad")
    plain = [torch.nn.Parameter(torch.empty_like(grad)) for grad in gradients_of(engine)]
    for param, grad in zip(plain, gradients_of(engine), strict=True):
        param.grad = grad
    norms = [torch.nn.utils.clip_grad_norm_(of, 0.01) for of in (plain, params)]
    assert_same_bits(*[[norm] for norm in norms], "the norm")
    stored = torch.bfloat16 if precision == "bf16" else torch.float32
    assert_same_bits([p.grad.to(stored) for p in plain], [g.to(stored) for g in gradients_of(engine)], "clipped")
    same_everywhere(gradients_of(engine))
    with pytest.raises(TrainingError, match=r"'words\.weight' can't be assigned, since several processes"):
        params[0].grad = torch.ones_like(params[0])
    engine.optimizer.step()
    same_everywhere(list(engine.state_dict().values()))
    engine.close()


def saving(precision: str, folder: str, replicas: int) -> None:
    """Save and load the module's state."""
    engine = started(precision, replicas)
    for step in range(2):
        backward(engine, step)
        engine.optimizer.step()
    full = engine.state_dict()
    assert_same_bits(full, dict(engine.module.state_dict()), "module.state_dict()")
    assert_same_bits(full, dict(copy.deepcopy(engine.module).state_dict()), "the copy")
    path = Path(folder) / "state.pt"
    state = engine.module.state_dict()
    if engine.world.rank == 0:
        torch.save(state, path)
    dist.barrier()
    exp_avg = engine.optimizer.state[engine.module.words.weight]["exp_avg"]
    same_everywhere([exp_avg])
    with engine.averaged():
        averages = engine.state_dict()
    assert_same_bits(full, engine.state_dict(), "parameters after the evaluation")
    assert not torch.equal(averages["words.weight"], full["words.weight"])
    backward(engine, 3)
    engine.optimizer.step()
    engine.module.load_state_dict(torch.load(path))
    assert_same_bits(full, engine.state_dict(), "the loaded state")
    with torch.no_grad():
        same_everywhere([engine(batch(9))])


@pytest.mark.parametrize("size, replicas", [(2, 1), (4, 2)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@ranks.in_processes()
def test_gradients_and_saving(precision, size, replicas, tmp_path):
    gradients(precision, replicas)
    saving(precision, tmp_path, replicas)


WIDTH = 32


class Net(nn.Module):
    """Tensor-parallel layers after a norm, whose plain parameters its forward wraps; the buffer differs per process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
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


@ranks.in_processes(4)
def test_habits_with_dtensors():
    grid, rank = ranks.mesh(dp=2, tp=2), dist.get_rank()
    config = ps.Config(device="cpu", precision="bf16", chunk_size=512, optimizer=ps.AdamW(lr=1e-2))
    extreme = {"evict_everything": True, "poison": True, "meter": ps.testing.NoMeter()}
    engine = ps.Engine(lambda: Net(grid["tp"]), config, world=World(torch.device("cpu")), mesh=grid["dp"], **extreme)
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
        assert_same_bits([whole["up.weight"]], [each.detach().full_tensor()], "a copy")
    assert "nan" not in repr(module.up.weight) and "'up.weight'" in repr(module.up.weight)

    changed = {name: value.clone() + 1 for name, value in module.state_dict().items()}
    module.load_state_dict(changed)
    assert_same_bits({name: value + 1 for name, value in whole.items()}, engine.state_dict(), "loaded values")
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
