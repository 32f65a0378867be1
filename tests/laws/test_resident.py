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
from toys import batches, inputs, layers, mean_square, module, train

from patrickstar import testing
from patrickstar._engine.engine import Engine

from .models import config, precisions, shapes
from .residents import PLENTY, SHAPE, engine_of, holds, same, train_until_resident

two_layers, three_layers, four_layers = (partial(layers, 8, count) for count in (2, 3, 4))
small_linear = partial(nn.Linear, 8, 8)


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


def late_view(kind):
    """Return a model that begins to keep views of a weight in a resident forward, and renews them at each call."""

    def forward(m, x):
        if m.calls > 5:
            weight = m.layers[2].weight
            m.view = {"t": weight.t, "detach": weight.detach, "rows": lambda: weight[2:4]}[kind]()
        return m.layers(x)

    return module(forward, layers=three_layers, view=lambda: None)


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
    same(late_view(kind), reading_the_view)


def clips_in_place(m, x):
    """Clip a weight in the forward, and keep a view of it."""
    with torch.no_grad():
        m.layers[1].weight.clamp_(-0.2, 0.2)
    if m.view is None:
        m.view = m.layers[2].weight.detach()[:4]
    return F.linear(m.layers(x), m.view).sum(1)


def changes(m, x):
    """Do in later iterations what was not done in the traced ones."""
    hidden = m.shared(m.first(x))
    if m.calls > 4 and m.calls % 2:
        hidden = checkpoint(m.second, hidden, use_reentrant=False)
    if m.calls > 5:
        hidden = m.shared(hidden.relu())
    return m.second(hidden) if m.calls > 3 else m.first(hidden)


def inside_and_outside(m, x):
    """Use a parameter inside and outside of a reentrant checkpoint."""
    return m.outer(checkpoint(m.inner, m.inner(m.outer(x)), use_reentrant=True))


def detaches_late(m, x):
    """From the fifth call on, read a trained weight without its gradient: autograd saves a view of it."""
    hidden = m.first(x)
    if m.calls > 4:
        hidden = F.linear(hidden, m.second.weight.detach())
    return m.second(hidden)


detaching = module(detaches_late, first=small_linear, second=small_linear)
UNUSUAL = {
    "clips in place": (module(clips_in_place, layers=three_layers, view=lambda: None), {}),
    "changes": (module(changes, first=two_layers, second=two_layers, shared=small_linear), {}),
    "reentrant": (module(inside_and_outside, inner=small_linear, outer=two_layers), {}),
    "detaches late": (detaching, {}),
    "detaches late, offloads": (detaching, {"activation_offload": True}),
}


@pytest.mark.parametrize("model", UNUSUAL)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_that_do_unusual_things(model, precision):
    build, more = UNUSUAL[model]
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


def assigns(m, x):
    """Assign values and data to weights in some forwards."""
    if m.calls > 4:
        weight = m.layers[1].weight
        weight.data = weight.detach() * 0.5
        with torch.no_grad():
            m.layers[2].bias.add_(1.0)
    return m.layers(x)


def clips_data(m, x):
    """Clip weights through `.data` in each forward, which leaves no trace in their version counters."""
    for layer in m.layers:
        layer.weight.data.clamp_(-0.2, 0.2)
    return m.layers(x)


@pytest.mark.parametrize(("forward", "accumulation"), [(assigns, 1), (assigns, 2), (clips_data, 1)])
def test_assignments_within_a_resident_forward(forward, accumulation):
    states = []
    for more in ({}, {"evict_everything": True}):
        engine = engine_of(module(forward, layers=three_layers), **more)
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
