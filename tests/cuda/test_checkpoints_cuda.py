"""Checkpoints of an engine on a CUDA device: dropout draws there, states lie there, on the host or on disk."""

import pytest
import torch
from torch import nn

import patrickstar as ps
from patrickstar import testing

from .test_cuda import _deterministic  # noqa: F401 (the fixture serves here too)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine offers no CUDA device"),
]

WIDTH = 256


def build():
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(12))
    return nn.Sequential(*layers)


def train(engine, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(steps):
        loss = engine(torch.randn(8, WIDTH, generator=generator)).float().pow(2).mean()
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        seen.append(loss.detach().cpu())
    return seen


def outcome(engine):
    states = engine.optimizer.state_dict()["state"]
    return [*engine.state_dict().values(), *(value for one in states.values() for value in one.values())]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, tier, precision, wait):
    budgets = {
        "device": {"device_memory": "1GiB"},
        "host": {"device_memory": "4MiB"},
        "disk": {"device_memory": "4MiB", "host_memory": "64MiB", "disk": ps.Disk(tmp_path)},
    }[tier]
    config = ps.Config(device="cuda", chunk_size="512KiB", precision=precision, **budgets)
    torch.manual_seed(0)
    engine, _ = ps.initialize(build, config)
    train(engine, 3, seed=1)
    engine.save(tmp_path / "kept", wait=wait)
    expected = train(engine, 2, seed=2) + outcome(engine)
    engine.close()
    torch.manual_seed(5)
    resumed, _ = ps.initialize(build, ps.Config(device="cuda", device_memory="1GiB", precision=precision))
    resumed.load(tmp_path / "kept")
    testing.assert_same_bits(expected, train(resumed, 2, seed=2) + outcome(resumed), "what followed")
    resumed.close()
