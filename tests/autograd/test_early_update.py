"""Optimizer-in-backward: the same bits, earlier updates, and errors for unsupported combinations."""

from unittest import mock

import pytest
from probes import optimizer_step_of
from torch import nn
from toys import Made, layers, mean_square, module, train

import patrickstar as ps
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._step.host_updates import HostUpdates
from patrickstar.errors import TrainingError

from .zoo import WIDTH, Stack, call_block, linear, mlp, normal, normal_batches, small_chunks, trains, weight


def stack(checkpointing="off"):
    return Stack([mlp(), mlp()], checkpointing)


def tied(checkpointing="off"):
    """Build a model with a weight read by the first and by the last operator."""
    return Made(lambda m, x: m.body(x @ m.table) @ m.table.t(), {"table": weight, "body": lambda: stack(checkpointing)})


def checkpoint_twice(m, x):
    """Recompute one layer twice, reentrantly, so that its gradients are computed in two parts."""
    for _ in range(2):
        x = call_block(m.shared, x, "reentrant")
    return m.own(x)


twice = module(checkpoint_twice, shared=linear, own=linear)


@pytest.mark.parametrize("stress", [True, False], ids=["everything evicted", "everything fits"])
@pytest.mark.parametrize(("build", "accumulation"), [(stack, 1), (tied, 1), (stack, 3)])
def test_the_same_bits(build, accumulation, stress, config, checkpointing):
    data = normal_batches(4 * accumulation)
    script = lambda trainer, _: train(trainer, data, accumulation=accumulation, update=True)  # noqa: E731
    ps.testing.compare(lambda: build(checkpointing), config, script, stress=stress)


@pytest.mark.skipif(CppBackend.find() is None, reason="without the C++ kernel nothing runs beside operators")
def test_the_same_bits_while_operators_run(precision):
    """As on a GPU, nothing waits for updates. Chunks have several pages and use the worker pool."""
    width = 1100

    def script(trainer, optimizer):
        if isinstance(trainer, ps.Engine):
            step = optimizer_step_of(trainer)
            step.updates.host = HostUpdates(step.kernels, None)
            step.updates.add = mock.Mock(wraps=step.updates.add)
        for seed in range(4):
            loss = mean_square(trainer(normal(2, width, seed=seed)))
            trainer.backward(loss, update=True)
            optimizer.step()
        assert not isinstance(trainer, ps.Engine) or step.updates.add.call_count >= 4
        return []

    config = small_chunks(precision, chunk_bytes=1 << 22).model_copy(update={"device_memory": 30 << 20})
    ps.testing.compare(lambda: layers(width, 3, nn.Tanh), config, script)


def updated_before_the_step(engine):
    """Return the parameters that a backward updates after two observed steps."""
    train(engine, [(normal(2, 3, WIDTH),)] * 2, update=True)
    before = {param.name: param.steps for param in engine.inspect().parameters}
    engine.backward(mean_square(engine(normal_batches(1)[0][0])), update=True)
    return {param.name for param in engine.inspect().parameters if param.steps > before[param.name]}


@pytest.fixture
def engine(config):
    with ps.testing.stressed(stack, config) as engine:
        yield engine


def test_chunks_are_updated_before_the_step(engine):
    names = set(dict(engine.module.named_parameters()))
    assert updated_before_the_step(engine) == names
    engine.optimizer.step()
    assert {param.steps for param in engine.inspect().parameters} == {3}


def test_gradients_that_grow_under_reentrant_checkpointing_are_updated_in_the_step():
    engine = ps.testing.stressed(twice, small_chunks("bf16", chunk_bytes=64))
    x = normal(2, WIDTH).requires_grad_()
    for _ in range(3):
        engine.backward(mean_square(engine(x)), update=True)
        late = {param.name for param in engine.inspect().parameters if param.has_gradient}
        engine.optimizer.step()
    assert late == {"shared.weight", "shared.bias"}
    engine.close()


def test_a_parameter_that_gets_no_gradient_is_not_waited_for():
    branch = module(lambda m, x: m.one(x), one=linear, never=linear)
    with ps.testing.stressed(branch, small_chunks("bf16", chunk_bytes=1 << 16)) as engine:
        assert updated_before_the_step(engine) == {"one.weight", "one.bias"}


def test_no_more_bytes_move(precision):
    """A gradient is copied to the host once, whenever its update runs; a chunk updated early may have to be evicted."""
    moved = []
    for update in (False, True):
        # Smaller than the `param16` list, so that chunks are evicted and fetched.
        config = small_chunks(precision).model_copy(update={"device_memory": 3600 if precision == "bf16" else 7200})
        engine = ps.Engine(stack, config, meter=ps.testing.NoMeter(), speculates=False)
        for (x,) in normal_batches(4):
            engine.backward(mean_square(engine(x)), update=update)
            engine.optimizer.step()
        moved.append(engine.stats.last.h2d_bytes + engine.stats.last.d2h_bytes)
        engine.close()
    assert 0 < moved[1] <= moved[0] + engine.layout.chunks[0].compute_bytes


CALLS = {
    "clipping": lambda engine: engine.clip_grad_norm_(1.0),
    "reading a gradient": lambda engine: engine.gradient("head.weight"),
    "dropping gradients": lambda engine: engine.optimizer.zero_grad(),
    "a forward": lambda engine: engine(normal(2, WIDTH)),
    "loading parameters": lambda engine: engine.load_state_dict(engine.state_dict()),
    "loading states": lambda engine: engine.optimizer.load_state_dict(engine.optimizer.state_dict()),
}


@pytest.mark.parametrize("act", CALLS)
def test_other_calls_before_the_step_are_rejected(act, engine):
    assert updated_before_the_step(engine)
    with pytest.raises(TrainingError, match=r"after engine.backward\(loss, update=True\)"):
        CALLS[act](engine)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def test_a_learning_rate_changed_too_late_is_refused(engine):
    assert updated_before_the_step(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(TrainingError, match="already updated with the old ones"):
        engine.optimizer.step()


def test_fp16_waits_for_all_gradients():
    engine = ps.testing.stressed(stack, small_chunks("fp16"))
    with pytest.raises(TrainingError, match="fp16"):
        engine.backward(mean_square(engine(normal(2, WIDTH))), update=True)
    engine.backward(mean_square(engine(normal(2, WIDTH))))
    engine.optimizer.step()
    engine.close()


def test_a_step_unlike_earlier_steps_raises_by_name():
    """Backward reads a parameter after its update, which no earlier backward did."""

    def forward(m, x):
        hidden = m.first(x)
        if m.reread:
            hidden.register_hook(lambda grad: grad + 0 * m.last(grad))
        return m.last(m.middle(hidden))

    rereads = module(forward, first=linear, middle=mlp, last=linear, reread=bool)
    engine = ps.testing.stressed(rereads, small_chunks("bf16", chunk_bytes=64))
    assert updated_before_the_step(engine)
    engine.optimizer.step()
    engine.module.reread = True
    with pytest.raises(TrainingError, match=r"last\.(weight|bias).*after it was updated in the same backward"):
        engine.backward(mean_square(engine(normal(2, WIDTH))), update=True)
    engine.optimizer.zero_grad()
    train(engine, [(normal(2, WIDTH),)] * 2, update=True)  # from now on the update runs in optimizer.step()
    engine.close()


@pytest.mark.parametrize("raw", [False, True], ids=["engine.backward", "loss.backward"])
def test_another_backward_before_the_step_is_rejected(raw, engine):
    x = normal(2, WIDTH)
    train(engine, [(x,)] * 2, update=True)
    first, second = mean_square(engine(x)), mean_square(engine(x))
    engine.backward(first, update=True)
    with pytest.raises(TrainingError, match="another backward"):
        second.backward() if raw else engine.backward(second)
    engine.optimizer.step()
    assert {param.steps for param in engine.inspect().parameters} == {3}


@trains(stack)
def test_a_gradient_of_an_earlier_backward_does_not_complete_a_chunk(trainer, optimizer):
    """Two losses of one forward: when the second backward starts, all gradients of the first are complete."""
    for step in range(4):
        out = trainer(normal(2, WIDTH, seed=step))
        trainer.backward(mean_square(out), retain_graph=True)
        trainer.backward(out.float().abs().mean(), update=True)
        optimizer.step()
        yield out.detach().clone()


def test_a_resumed_engine_observes_a_step_first():
    """Observations of gradients are not saved: under reentrant checkpointing some gradients grow."""

    data = [(normal(2, WIDTH, seed=step).requires_grad_(),) for step in range(3)]
    one, other = (ps.testing.stressed(twice, small_chunks("bf16", chunk_bytes=64)) for _ in range(2))
    train(one, data, update=True)
    other.load_state_dict(one.state_dict())
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    for engine in (one, other):
        train(engine, data, update=True)
    ps.testing.assert_same_bits(one.state_dict(), other.state_dict(), "parameters")
    one.close()
    other.close()


def test_close_waits_for_running_updates():
    width = 1200
    config = small_chunks("bf16", chunk_bytes=1 << 23).model_copy(update={"device_memory": 8 << 20})  # not the states
    engine = ps.Engine(lambda: nn.Linear(width, width), config, meter=ps.testing.NoMeter())
    optimizer_step = optimizer_step_of(engine)
    optimizer_step.updates.host = HostUpdates(optimizer_step.kernels, None)
    x = normal(2, width)
    train(engine, [(x,)] * 3, update=True)
    engine.backward(mean_square(engine(x)), update=True)
    assert optimizer_step.updates.queue.updates
    engine.close()
    assert all(param.isfinite().all() for param in engine.module.parameters())
