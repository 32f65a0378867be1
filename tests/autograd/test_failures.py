"""After an exception at any point the engine can continue to train, as plain PyTorch can."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn as nn
from pydantic import Field
from toys import mean_square, module, update

import patrickstar as ps

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, small_chunks, train, trains


class Trip(RuntimeError):
    pass


class Tripwire(nn.Module):
    """Raises when armed: in the middle of its forward, or in backward, between the gradients of its two layers."""

    def __init__(self, error=Trip, in_backward=False):
        super().__init__()
        self.before, self.after = linear(), linear()
        self.error, self.in_backward, self.armed = error, in_backward, False

    def forward(self, x):
        x = torch.tanh(self.before(x))
        if not self.in_backward:
            self.trip()
        elif x.requires_grad:
            x.register_hook(self.trip)
        return self.after(x)

    def trip(self, grad=None):
        if self.armed:
            self.armed = False
            raise self.error("armed")


@pytest.mark.parametrize("error", [Trip, KeyboardInterrupt], ids=lambda error: error.__name__)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@trains(lambda error, checkpointing: Stack([mlp(), Tripwire(error), mlp()], checkpointing))
def test_exception_in_forward(trainer, optimizer, error, training):
    """In the middle of the very first one, and in later ones."""
    for step in range(3):
        trainer.module.train(training)
        with torch.set_grad_enabled(training):
            trip_forward(trainer, 1, error)
        trainer.module.train()
        yield from train(trainer, steps=1, first=step)


def trip_forward(trainer, block, error):
    trainer.module.blocks[block].armed = True
    with pytest.raises(error, match="armed"):
        trainer(normal(2, 3, WIDTH))


def trip_backward(trainer, block):
    loss = mean_square(trainer(normal(2, 3, WIDTH)))
    trainer.module.blocks[block].armed = True
    with pytest.raises(Trip, match="armed"):
        trainer.backward(loss)
    assert not trainer.module.blocks[block].armed


def assert_failure_leaves_no_trace(build, config):
    """Assert that steps around a backward that failed in the second block equal those of a run without it."""
    runs = []

    def script(trainer, optimizer, failing):
        losses = []
        for step in range(3):
            if failing:
                trip_backward(trainer, 1)
                optimizer.zero_grad()
            losses += train(trainer, steps=1, first=step)
        runs.append([*losses, *trainer.state_dict().values()])
        return losses

    for failing in (False, True):
        ps.testing.compare(build, config, lambda *trainer, failing=failing: script(*trainer, failing))
    for found in runs[1:]:
        ps.testing.assert_same_bits(runs[0], found, "steps around the failure")


def test_exception_in_backward(config, checkpointing):
    assert_failure_leaves_no_trace(lambda: Stack([mlp(), Tripwire(in_backward=True), mlp()], checkpointing), config)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_exception_in_a_recomputed_forward(way, config):
    """The forward succeeds; its recomputation inside backward raises."""
    assert_failure_leaves_no_trace(lambda: Stack([mlp(), Tripwire(), mlp()], way), config)


@trains(lambda: Stack([mlp(), Tripwire(), mlp()]))
def test_exception_between_micro_batches_keeps_earlier_gradients(trainer, optimizer):
    """The first micro-batch's gradients survive an exception in the second one's forward."""
    yield from train(trainer, steps=1)
    trainer.backward(mean_square(trainer(*normal_batches(1)[0])))
    trip_forward(trainer, 1, Trip)
    yield update(trainer, mean_square(trainer(*normal_batches(2)[1])))
    yield from train(trainer, steps=1)


def test_an_exception_that_the_model_catches(config, checkpointing):
    """The block's error is caught, and another branch is taken."""

    def forward(m, x):
        m.wire.armed = True
        try:
            return m.wire(x)
        except Trip:
            return m.otherwise(x)

    recovering = module(forward, wire=Tripwire, otherwise=linear)
    ps.testing.assert_exact(lambda: Stack([recovering(), mlp()], checkpointing), normal_batches(), config)


@trains(lambda: Stack([mlp()]))
def test_wrong_input_shape_then_training(trainer, optimizer):
    for step in range(2):
        with pytest.raises(RuntimeError):
            trainer(normal(2, 3, WIDTH + 1))
        yield from train(trainer, steps=1, first=step)


# A failed update: the chunks contain parameters, never gradients in their place


@dataclass(frozen=True)
class BreaksOnce(ps.Rule):
    """Gradient descent that fails at the third parameter."""

    calls: list = field(hash=False)
    kinds = ()

    def apply(self, master, grad, states):
        self.calls.append(master.numel())
        if len(self.calls) == 3:
            raise RuntimeError("the third one")
        master.sub_(grad * 0.1)


class Breaking(ps.Optimizer):
    """Optimizer that uses `BreaksOnce`."""

    lr: float = 0.1
    calls: list = Field(default_factory=list)

    def rule(self, group, step, memory):
        return BreaksOnce(self.calls)


def test_after_a_failed_update_the_engine_continues_with_valid_parameters():
    options = Breaking(calls=[])
    engine = ps.testing.stressed(mlp, small_chunks("bf16", chunk_bytes=1 << 16, optimizer=options))
    before = engine.state_dict()
    (x,) = normal_batches(1)[0]
    engine.backward(mean_square(engine(x)))
    with pytest.raises(RuntimeError, match="the third one") as caught:
        engine.optimizer.step()
    assert any("chunk 0" in note and "updated in part" in note for note in caught.value.__notes__)
    assert not any(param.has_gradient for param in engine.inspect().parameters)
    engine.optimizer.zero_grad()
    after = engine.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 2
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach().clone(), after[name].bfloat16())
    engine.backward(mean_square(engine(x)))
    engine.optimizer.step()
    assert {param.steps for param in engine.inspect().parameters} == {1}
    engine.close()
