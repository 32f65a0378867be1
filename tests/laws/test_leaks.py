"""Law 6, leaks: no pin after a step, no hook after closing, and a usable engine after an exception."""

import gc
import weakref

import pytest
import torch
from seeded import engine_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import Shape, batches, train

import patrickstar as ps
from patrickstar._params import residency
from patrickstar._params.tensor_subclass import ChunkParameter

from .models import config

SHAPE = Shape(("mlp", "attention", "plain"), tied=True, frozen_norms=True, checkpointing=True)


def make(**options) -> ps.Engine:
    return engine_of(SHAPE.build, config("bf16", 256), **options)


def assert_at_rest(engine: ps.Engine) -> None:
    state = engine.inspect()
    assert all(chunk.pins == 0 for chunk in state.chunks)
    assert all(param.uses == 0 and param.state == "HOLD" for param in state.parameters)
    assert not state.window_open


@pytest.mark.parametrize("evict_everything", [False, True])
def test_a_step_leaves_nothing_pinned_and_no_memory(evict_everything):
    engine = make(evict_everything=evict_everything)
    for _ in range(3):
        train(engine, batches(1))
        assert_at_rest(engine)
    tensors = count_tensors()
    used = engine.inspect().device, engine.inspect().host
    train(engine, batches(5))
    assert count_tensors() == tensors
    assert (engine.inspect().device, engine.inspect().host) == used


def test_the_trace_of_forwards_that_no_backward_follows_is_bounded(monkeypatch):
    monkeypatch.setattr(residency, "MAX_FORWARDS", 3)
    engine, lengths = make(), []
    for (batch,) in batches(9):
        engine(batch)
        lengths.append(len(engine.inspect().trace))
    assert max(lengths) == 3 * lengths[0] == lengths[2] and lengths[3] == lengths[0]
    losses = []
    for trained in (make(), engine):
        torch.manual_seed(1)
        losses.append(train(trained, batches(2)))
    ps.testing.assert_same_bits(*losses, "losses")


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_close_leaves_a_plain_model_without_hooks():
    engine = make()
    train(engine, batches(2))
    module, state = engine.module, engine.state_dict()
    engine.close()
    assert not any(isinstance(param, ChunkParameter) for param in module.parameters())
    assert all(type(param) is nn.Parameter for param in module.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    module.float()(batches(1)[0][0]).backward()
    with pytest.raises(ps.errors.TrainingError, match="closed"):
        engine(batches(1)[0][0])
    engine.close()


def test_a_closed_engine_that_a_hook_of_the_user_refers_to_is_collected():
    engine = make()
    next(engine.module.parameters()).register_hook(lambda grad, engine=engine: None)
    train(engine, batches(1))
    engine.close()
    collected = weakref.ref(engine)
    del engine
    gc.collect()
    assert collected() is None


def test_an_engine_may_be_collected_while_a_compiler_is_tracing():
    """The garbage collector may run at any time, with any torch mode active."""
    engine = make()
    train(engine, batches(2))
    module = engine.module
    expected = engine.state_dict()["words.weight"]
    with FakeTensorMode():
        del engine
        gc.collect()
    assert type(module.words.weight) is nn.Parameter
    assert torch.equal(module.words.weight.detach(), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_engine_is_usable_after_an_exception(where):
    def fail(*args):
        raise RuntimeError("trouble")

    def fail_in_backward(module, args, out):
        out.register_hook(fail)

    engine, untouched = make(evict_everything=True), make(evict_everything=True)
    layer = engine.module.blocks[1]
    handle = layer.register_forward_hook(fail if where == "forward" else fail_in_backward)
    with pytest.raises(RuntimeError, match="trouble"):
        train(engine, batches(1))
    handle.remove()
    engine.optimizer.zero_grad()
    assert_at_rest(engine)
    torch.manual_seed(1)
    losses = train(engine, batches(2))
    torch.manual_seed(1)
    assert train(untouched, batches(2)) == losses
