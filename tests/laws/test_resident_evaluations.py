"""Evaluations during which all parameters stay on the device, with the same results."""

import pytest
import torch
from torch import nn
from toys import batches, inputs, layers

from patrickstar import testing

from .models import config
from .residents import PLENTY, SHAPE, engine_of, holds, same


def test_an_evaluation_may_return_views():
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.calls = layers(8, 2), 0

        def forward(self, x):
            self.calls += 1
            return self.layers[0].weight.t() if self.calls > 4 else self.layers(x)

    engine = engine_of(Returning)
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
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(8, 4, nn.Tanh)

        def forward(self, x):
            with torch.enable_grad():
                return self.layers(x)

    gradients = []
    for options in (PLENTY, None):
        torch.manual_seed(0)
        trainer = engine_of(Forces) if options else testing.ReferenceTrainer(Forces, config("fp32", 256))
        x = inputs(1, 8)[0][0].requires_grad_()
        with torch.no_grad():
            *_, out = [trainer(x) for _ in range(4)]
        gradients.append(torch.autograd.grad(out.sum(), x)[0])
    assert torch.equal(*gradients)
