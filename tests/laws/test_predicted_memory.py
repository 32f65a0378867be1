"""A dry run predicts the memory of tensors at each moment of a step, to the byte."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toys import Shape, batches

import patrickstar as ps
from patrickstar._dry_run.simulation import simulate_on_this_machine
from patrickstar._engine.engine import Engine

from .test_dry_run import LAPTOP


class Text(nn.Module):
    """Model of token ids: masks of integers, attention, checkpointed blocks with saved random states, dropout."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding, self.positions = nn.Embedding(512, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 512)

    def forward(self, ids, labels):
        hidden = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        mask = ids.eq(0)
        for block in self.blocks:
            if self.checkpointed:
                hidden = checkpoint(block, hidden, None, mask, use_reentrant=False)
            else:
                hidden = block(hidden, None, mask)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), labels.flatten())


def ids_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(1, 512, (count, 24))
    return ids, ids


def step_of(batch):
    def step(engine):
        engine.backward(engine(*batch))
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step


CASES = {
    "text": (lambda: Text(False), lambda: ids_of(4)),
    "checkpointed text": (lambda: Text(True), lambda: ids_of(3)),
    "small": (Shape(("mlp", "attention", "plain")).build, lambda: batches(1)[0]),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("room", ["all", "half", "disk"])
@pytest.mark.parametrize("case", CASES)
def test_predicted_memory_is_measured_memory(case, room, precision, tmp_path):
    build, inputs = CASES[case]
    numel = sum(param.numel() for param in build().parameters())
    more = {}
    if room != "all":
        more["device_memory"] = (1 << 22) + 2 * numel
    if room == "disk":
        more |= {"host_memory": (1 << 20) + 9 * numel, "disk": tmp_path}
    config = ps.Config(device="cpu", precision=precision, chunk_size=32768, **more)
    gc.collect()  # an engine of another test that is released during a step would allocate tensors
    with contextlib.closing(Engine(build, config)) as engine:
        step = step_of(inputs())
        for _ in range(3):
            step(engine)
        trace, measured = engine.inspect().trace, engine.stats.last
    del engine, step
    step = step_of(inputs())
    report = simulate_on_this_machine(Engine, build, config, step, torch.device("cpu"), LAPTOP)
    predicted = [moment.non_model_bytes for moment in report.trace.moments]
    assert predicted == [moment.non_model_bytes for moment in trace]
    for name in ("device_peak_non_model_bytes", "device_peak_model_bytes", "host_peak_model_bytes", "disk_bytes"):
        assert getattr(report.stats, name) == getattr(measured, name), name
