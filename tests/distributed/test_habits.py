"""Habits of PyTorch users with two processes: every process makes the same calls, and has the same results."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from habits.registry import batch, build, mean_square

import patrickstar as ps
from patrickstar.errors import TrainingError
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
