"""Operations of a recorded step's products: those that PyTorch's own counter finds in the unmanaged model."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import patrickstar as ps

IDS = torch.arange(12).view(3, 4)
CONFIG = ps.Config(device="cpu", precision="fp32", device_memory="1MiB", host_memory="1MiB")


class Products(nn.Module):
    """Products in the forms that models have; the embedding's lookup and the norm have none."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 12)
        self.weight = nn.Parameter(torch.randn(12, 8) / 4)
        self.bias = nn.Parameter(torch.zeros(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        hidden = self.norm(self.block(self.words(ids)))
        return (hidden @ self.words.weight.T).float().pow(2).mean()

    def block(self, hidden):
        hidden = self.linear(hidden)  # of three dimensions
        return self.frozen(torch.addmm(self.bias, hidden.view(-1, 12), self.weight))


class Checkpointed(Products):
    def block(self, hidden):
        return checkpoint(super().block, hidden, use_reentrant=False)


class FirstLayer(nn.Module):
    """Its input needs no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6, bias=False)

    def forward(self, ids):
        return torch.matmul(ids.to(self.linear.weight.dtype), self.linear.weight.mT).float().pow(2).mean()


def recorded(model, start):
    torch.manual_seed(0)
    with start(model, CONFIG) as engine, engine.record() as recording:
        for _ in range(8):
            engine.backward(engine(IDS))
            engine.optimizer.step()
    return recording.timelines


def counted(model):
    """Return the operations of a step in plain PyTorch."""
    torch.manual_seed(0)
    plain = model()
    with FlopCounterMode(display=False) as counter:
        plain(IDS).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("start", [ps.Engine, ps.testing.stressed], ids=["resident", "evicted"])
@pytest.mark.parametrize("model", [Products, Checkpointed, FirstLayer])
def test_operations_are_those_of_pytorchs_counter(model, start):
    expected = counted(model)
    for timeline in recorded(model, start):
        assert sum(each.operations for each in timeline.products) == expected
        assert all(each.seconds > 0 for each in timeline.products)
        assert sum(each.seconds for each in timeline.products) < timeline.seconds
    # The head reads a view of the embedding.
    names = {"linear.weight"} if model is FirstLayer else {"linear.weight", "weight", "frozen.weight", "words.weight"}
    assert {each.name for each in timeline.products} == names


def test_what_is_not_recorded_is_not_timed():
    engine, optimizer = ps.initialize(Products, CONFIG)
    with engine, engine.record() as recording:
        for _ in range(3):  # the third step has no timeline
            engine.backward(engine(IDS))
            optimizer.step()
    assert [timeline.step for timeline in recording.timelines] == [1, 2]
    first, second = ({(each.name, each.backward): each.operations for each in t.products} for t in recording.timelines)
    assert first == second
