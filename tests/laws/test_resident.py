"""Resident iterations run without accesses and with few windows; so do evaluations, with the same bits."""

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from sampling import drawn
from seeded import compared, reference_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import batches, inputs, layers, mean_square, module, train

import patrickstar as ps
from patrickstar._autograd import windows

from . import tiers
from .models import Fixed, config, precisions, shapes
from .residents import PLENTY, SHAPE, engine_of, holds, same, train_until_resident

two_layers, three_layers, four_layers = (partial(layers, 8, count) for count in (2, 3, 4))
small_linear = partial(nn.Linear, 8, 8)


@drawn(40, shapes, precisions, st.integers(1, 3), st.sampled_from([None, 0.1]), st.booleans())
def test_results_are_those_of_plain_pytorch(shape, precision, accumulation, max_norm, update):
    update = update and precision != "fp16" and max_norm is None
    options = config(precision, 256, device_memory=PLENTY)
    how = {"accumulation": accumulation, "max_norm": max_norm, "update": update}
    same(shape.build, lambda trainer: train(trainer, batches(7 * accumulation), **how), options)


def test_chunks_that_fit_are_held_from_the_third_iteration_to_its_step():
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
    # Chunks that do not fit are not held.
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
    return nn.functional.linear(m.layers(x), m.view).sum(1)


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
        hidden = nn.functional.linear(hidden, m.second.weight.detach())
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
        loss.backward() if isinstance(trainer, ps.Engine) else trainer.backward(loss)
        trainer.optimizer.step()
    return []


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
    ps.testing.assert_same_bits(*states, "parameters")


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

        return []

    with compared(partial(layers, 8, 40), options, script, meter=meter) as engine:
        assert engine.stats.last.evictions > 0


def in_place_on_outputs(m, x):
    """Change outputs of operators in place: those that are views get another node in the graph."""
    weight = m.layers[0][0].weight
    hidden = torch.einsum("bi,oi->ob", x, weight).mul_(2.0).t()
    hidden = hidden + nn.functional.bilinear(x, x, m.core).add_(1.0)
    hidden = nn.functional.linear(hidden, weight).tanh_()
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

    ids = [(torch.randint(0, 2048, (2, 3), generator=torch.Generator().manual_seed(seed)),) for seed in range(9)]
    tied = module(forward, embedding=lambda: nn.Embedding(2048, 8), layers=lambda: layers(8, 2))
    same(tied, lambda trainer: train(trainer, ids), config("fp32", 16384, device_memory=96 * 1024))


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


LOOPS = {
    "several backwards": (several_backwards, lambda: layers(8, 4, nn.Tanh)),
    "own backward": (own_backward, lambda: layers(8, 4, nn.Tanh)),
    "backwards that find gradients in place of parameters": (backwards, build_in_place),
    "evaluations between and within iterations": (evaluating, SHAPE.build),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loop", LOOPS)
def test_unusual_loops(loop, precision):
    script, build = LOOPS[loop]
    same(build, script, config(precision, 256, device_memory=PLENTY))


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
