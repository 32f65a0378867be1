"""Windows of resident iterations, which open where a backward reads what is not in its place; and evaluations."""

import pytest
import torch
from seeded import compared, reference_of
from torch import nn
from torch.nn import functional as F
from toys import batches, inputs, layers, mean_square, module

from patrickstar._autograd import windows

from . import tiers
from .models import config
from .residents import PLENTY, SHAPE, engine_of, holds, same


def in_place_on_outputs(m, x):
    """Change outputs of operators in place: those that are views get another node in the graph."""
    weight = m.layers[0][0].weight
    hidden = torch.einsum("bi,oi->ob", x, weight).mul_(2.0).t()
    hidden = hidden + F.bilinear(x, x, m.core).add_(1.0)
    hidden = F.linear(hidden, weight).tanh_()
    hidden = hidden + torch.tensordot(hidden, weight, dims=([1], [1]))[:, :8].relu_()
    hidden = hidden + m.lstm(hidden)[0] * 0.5 + m.attention(hidden, hidden, hidden)[0].sigmoid_()
    return m.layers(hidden)


build_in_place = module(
    in_place_on_outputs,
    layers=lambda: layers(8, 3, nn.Tanh),
    core=lambda: nn.Parameter(torch.randn(8, 8, 8) / 8),
    lstm=lambda: nn.LSTM(8, 8, batch_first=True),
    attention=lambda: nn.MultiheadAttention(8, 2),
)


def backwards(trainer):
    results = []
    for number, (x,) in enumerate(inputs(7, 8)):
        loss, other = mean_square(trainer(x)), mean_square(trainer(3 * x))
        trainer.backward(loss, retain_graph=True)
        trainer.backward(other)
        if number > 3:
            trainer.backward(loss)
        trainer.optimizer.step()
        results.append(loss.detach().clone())
    return results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_backwards_that_find_gradients_in_place_of_parameters(precision):
    same(build_in_place, backwards, config(precision, 256, device_memory=PLENTY))


def test_the_nodes_of_views_need_a_window_each(monkeypatch):
    """Without them the law above is broken: a backward reads the gradient that replaced its weight."""
    hooked = windows.GraphSnapshot.added
    monkeypatch.setattr(windows.GraphSnapshot, "added_nodes", lambda self, nodes: iter(hooked(self, nodes)))
    with pytest.raises((AssertionError, RuntimeError)):
        same(build_in_place, backwards)


def evaluations(trainer):
    """Evaluate between backward and step, and after the step, whose updates from disk are deferred."""
    results = []
    for (x,) in tiers.inputs(8):
        loss = mean_square(trainer(x))
        trainer.backward(loss)
        for _ in range(2):
            with torch.no_grad():
                results.append(trainer(x).sum())
            trainer.optimizer.step()
        results.append(loss.detach().clone())
    return results


@pytest.mark.parametrize("device_memory", ["150KiB", "200KiB", "260KiB"])
def test_held_parameters_whose_updates_are_deferred(device_memory, tmp_path):
    options = config("fp32", 9000, device_memory=device_memory, host_memory="72KiB", disk=tmp_path)
    with compared(tiers.blocks, options, evaluations, page_bytes=tiers.PAGE_BYTES) as engine:
        assert engine.stats.total.disk_read_bytes > 0


def test_an_embedding_on_the_host_is_not_held():
    """Its lookups stay on the host also in resident iterations, and an operator on its weight moves it back."""

    def forward(m, ids):
        out = m.layers(m.embedding(ids)).sum(1)
        return out if m.calls % 6 else out + m.embedding.weight[:3].sum()

    def run(trainer):
        torch.manual_seed(1)
        for _ in range(9):
            trainer.backward(mean_square(trainer(torch.randint(0, 2048, (2, 3)))))
            trainer.optimizer.step()
        return []

    tied = module(forward, embedding=lambda: nn.Embedding(2048, 8), layers=lambda: layers(8, 2))
    same(tied, run, config("fp32", 16384, device_memory=96 * 1024))


# Evaluations during which all parameters stay on the device, with the same results


def test_an_evaluation_may_return_views():
    def forward(m, x):
        return m.layers[0].weight.t() if m.calls > 4 else m.layers(x)

    engine = engine_of(module(forward, layers=lambda: layers(8, 2)))
    with torch.no_grad():
        *_, view = [engine(*inputs(1, 8)[0]) for _ in range(6)]
    expected = engine.state_dict()["layers.0.weight"].t()
    assert torch.equal(view.clone(), expected)
    assert type(view).__name__ == "ChunkView"


def test_an_evaluation_holds_chunks_once_its_memory_is_known():
    engine = engine_of(SHAPE.build)
    found = []
    engine.module.head.register_forward_hook(lambda *_: found.append(holds(engine)))
    with torch.no_grad():
        results = [engine.eval()(*batches(1)[0]) for _ in range(3)]
    assert found[0] < found[1] == found[2] == engine.layout.chunk_count
    assert torch.equal(results[0], results[2]) and holds(engine) == 0
    with torch.no_grad():
        engine(*batches(1, length=3)[0])
    assert found[3] == found[0], "another shape is measured first"


def evaluating(trainer):
    results = []
    for batch in batches(6):
        for _ in range(2):
            with torch.no_grad():
                results.append(trainer.eval()(*batch))
        loss = trainer.train()(*batch)
        with torch.inference_mode():
            results.append(trainer.eval()(*batch).clone())
        trainer.train().backward(loss)
        with torch.no_grad():
            results.append(trainer.eval()(*batch))
        trainer.optimizer.step()
    return results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluations_between_and_within_iterations(precision):
    options = config(precision, 256, device_memory=PLENTY)
    same(SHAPE.build, evaluating, options)


def test_an_evaluation_may_return_a_graph():
    def forward(m, x):
        with torch.enable_grad():
            return m.layers(x)

    forces, gradients = module(forward, layers=lambda: layers(8, 4, nn.Tanh)), []
    for trainer in (engine_of(forces), reference_of(forces, config("fp32", 256))):
        x = inputs(1, 8)[0][0].requires_grad_()
        with torch.no_grad():
            *_, out = [trainer(x) for _ in range(4)]
        gradients.append(torch.autograd.grad(out.sum(), x)[0])
    assert torch.equal(*gradients)
