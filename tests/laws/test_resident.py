"""Iterations whose parameters stay on the device run without accesses and windows, with the same bits."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from seeded import reference_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toys import batches, inputs, layers, mean_square, train

from patrickstar import testing
from patrickstar._engine.engine import Engine

from .models import config, precisions, shapes
from .residents import PLENTY, SHAPE, engine_of, holds, same, train_until_resident

four_layers = partial(layers, 8, 4)


@settings(max_examples=draws(40), deadline=None, print_blob=True)
@given(shapes, precisions, st.integers(1, 3), st.sampled_from([None, 0.1]), st.booleans())
def test_results_are_those_of_plain_pytorch(shape, precision, accumulation, max_norm, update):
    update = update and precision != "fp16" and max_norm is None
    options = config(precision, 256, device_memory=PLENTY)
    how = {"accumulation": accumulation, "max_norm": max_norm, "update": update}
    same(shape.build, lambda trainer: train(trainer, batches(7 * accumulation), **how), options)


def test_chunks_are_held_from_the_third_iteration_to_its_step():
    engine = engine_of(SHAPE.build)
    found = []
    for batch in batches(4):
        loss = engine(*batch)
        found.append(holds(engine))
        engine.backward(loss)
        assert holds(engine) == found[-1]
        engine.optimizer.step()
        assert holds(engine) == 0
    assert found[:2] == [0, 0] and found[2] == found[3] == engine.layout.chunk_count
    engine.backward(engine(*batches(1, length=4)[0]))
    assert holds(engine) == 0, "another input shape is traced first"


def test_chunks_that_do_not_fit_are_not_held():
    engine = engine_of(lambda: layers(8, 32), config("fp32", 256, device_memory=8 * 1024))
    train_until_resident(engine, inputs(1, 8) * 3)
    engine(*inputs(1, 8)[0])
    assert holds(engine) == 0


def test_views_kept_in_a_resident_iteration_are_intercepted_later():
    engine = engine_of(lambda: layers(8, 6))
    train_until_resident(engine, inputs(1, 8) * 3)
    engine.backward(mean_square(engine(*inputs(1, 8)[0])))
    view = engine.module[0].weight.t()
    engine.optimizer.step()
    assert torch.equal(view.clone(), engine.module[0].weight.t())
    assert type(view).__name__ == "ChunkView"


class LateView(nn.Module):
    """Begins to keep views of a weight in a resident forward; renews them at each call."""

    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind, self.calls, self.view = layers(8, 3), kind, 0, None

    def forward(self, x):
        self.calls += 1
        if self.calls > 5:
            weight = self.layers[2].weight
            self.view = {"t": weight.t, "detach": weight.detach, "rows": lambda: weight[2:4]}[self.kind]()
        return self.layers(x)


def reading_the_view(trainer):
    results = []
    for (x,) in inputs(9, 8):
        trainer.backward(mean_square(trainer(x)))
        for act in (lambda: None, trainer.optimizer.step):
            act()
            if trainer.module.view is not None:
                results.append(trainer.module.view.detach().float().sum())
    return results


@pytest.mark.parametrize("kind", ["t", "detach", "rows"])
def test_views_that_outlive_a_resident_forward(kind):
    """Between backward and step the gradient is stored in place of the weight; the view still reads the weight."""
    same(lambda: LateView(kind), reading_the_view)


class InPlace(nn.Module):
    """Clips its weight in the forward, and keeps a view of it."""

    def __init__(self):
        super().__init__()
        self.layers, self.view = layers(8, 3), None

    def forward(self, x):
        with torch.no_grad():
            self.layers[1].weight.clamp_(-0.2, 0.2)
        if self.view is None:
            self.view = self.layers[2].weight.detach()[:4]
        return F.linear(self.layers(x), self.view).sum(1)


class Changing(nn.Module):
    """Does in later iterations what it did not do in the traced ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.shared = layers(8, 2), layers(8, 2), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        hidden = self.shared(self.first(x))
        if self.calls > 4 and self.calls % 2:
            hidden = checkpoint(self.second, hidden, use_reentrant=False)
        if self.calls > 5:
            hidden = self.shared(hidden.relu())
        return self.second(hidden) if self.calls > 3 else self.first(hidden)


class Reentrant(nn.Module):
    """Uses a parameter inside and outside of a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), layers(8, 2)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, self.inner(self.outer(x)), use_reentrant=True))


class DetachesLate(nn.Module):
    """From the fifth call on, reads a trained weight without its gradient: autograd saves a view of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        hidden = self.first(x)
        if self.calls > 4:
            hidden = F.linear(hidden, self.second.weight.detach())
        return self.second(hidden)


@pytest.mark.parametrize(
    ("build", "more"),
    [(InPlace, {}), (Changing, {}), (Reentrant, {}), (DetachesLate, {}), (DetachesLate, {"activation_offload": True})],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_that_do_unusual_things(build, more, precision):
    options = config(precision, 256, device_memory=PLENTY, **more)
    same(build, lambda trainer: train(trainer, inputs(9, 8)), options)


def several_backwards(trainer):
    """Run more backwards than the trace has."""
    results = []
    for number, (x,) in enumerate(inputs(8, 8)):
        loss = mean_square(trainer(x))
        if number > 4:
            trainer.backward(loss, retain_graph=True)
        if number > 5:
            trainer.backward(mean_square(trainer(2 * x)))
        trainer.backward(loss)
        trainer.optimizer.step()
        results.append(loss.detach().clone())
    return results


def own_backward(trainer):
    """Run backward without the engine."""
    for (x,) in inputs(6, 8):
        loss = mean_square(trainer(x))
        loss.backward() if isinstance(trainer, Engine) else trainer.backward(loss)
        trainer.optimizer.step()
    return []


@pytest.mark.parametrize("script", [several_backwards, own_backward])
def test_unusual_loops(script):
    same(partial(layers, 8, 4, nn.Tanh), script)


class Assigning(nn.Module):
    """Assigns values and data to its weights in some forwards."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = layers(8, 3), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 4:
            weight = self.layers[1].weight
            weight.data = weight.detach() * 0.5
            with torch.no_grad():
                self.layers[2].bias.add_(1.0)
        return self.layers(x)


class ClipsData(nn.Module):
    """Clips its weights through `.data` in each forward, which leaves no trace in their version counters."""

    def __init__(self):
        super().__init__()
        self.layers = layers(8, 3)

    def forward(self, x):
        for layer in self.layers:
            layer.weight.data.clamp_(-0.2, 0.2)
        return self.layers(x)


@pytest.mark.parametrize(("build", "accumulation"), [(Assigning, 1), (Assigning, 2), (ClipsData, 1)])
def test_assignments_within_a_resident_forward(build, accumulation):
    states = []
    for more in ({}, {"evict_everything": True}):
        engine = engine_of(build, **more)
        train(engine, inputs(8, 8), accumulation=accumulation)
        states.append(engine.state_dict())
    testing.assert_same_bits(*states, "parameters")


def test_a_graph_kept_beyond_the_step_raises_and_reads_no_freed_memory():
    def build():
        model = four_layers()
        model[0].requires_grad_(False)
        return model

    engine = engine_of(build)
    train_until_resident(engine, inputs(1, 8) * 3)
    x = inputs(1, 8)[0][0].requires_grad_()
    loss = mean_square(engine(x)) + mean_square(engine.module[0](x))
    engine.backward(loss, retain_graph=True)
    engine.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    engine.optimizer.zero_grad()
    train_until_resident(engine, inputs(1, 8))


def test_an_exception_ends_the_holds():
    engine = engine_of(four_layers)
    for count in (3, 4):
        train_until_resident(engine, inputs(1, 8) * count)
        engine(*inputs(1, 8)[0])
        assert holds(engine)
        with pytest.raises(RuntimeError):
            engine(torch.zeros(3, 5))
        assert holds(engine) == 0


class Fixed(testing.NoMeter):
    """Meter of a given amount."""

    nbytes = 0

    def now(self, chunk_bytes):
        return self.nbytes

    peak = now


def test_memory_needed_in_a_resident_iteration_is_taken_from_held_chunks():
    """An evaluation between backward and step needs more memory than the training step: held chunks are evicted."""
    meter, options = Fixed(), config("fp32", 256, device_memory=1 << 16)

    def script(trainer):
        train(trainer, inputs(1, 8) * 3)
        trainer.backward(mean_square(trainer(*inputs(1, 8)[0])))
        meter.nbytes = options.device_memory - 5 * 1024
        with torch.no_grad():
            trainer(torch.zeros(9, 8))
        meter.nbytes = 0
        trainer.optimizer.step()

    reference = reference_of(lambda: layers(8, 40), options)
    engine = engine_of(lambda: layers(8, 40), options, meter=meter)
    for trainer in (reference, engine):
        script(trainer)
    assert engine.stats.last.evictions > 0
    testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
