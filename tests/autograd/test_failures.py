"""After an exception at any point the engine can continue to train, as plain PyTorch can."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square

from patrickstar import testing

from .zoo import WIDTH, Stack, linear, mlp, module, normal, normal_batches, train, update


class Trip(RuntimeError):
    pass


class Tripwire(nn.Module):
    """Raises in the middle of its forward, when armed."""

    def __init__(self, error=Trip):
        super().__init__()
        self.before, self.after = linear(), linear()
        self.error, self.armed = error, False

    def forward(self, x):
        x = torch.tanh(self.before(x))
        if self.armed:
            self.armed = False
            raise self.error("armed")
        return self.after(x)


class FailingIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.wire.armed:
            ctx.wire.armed = False
            raise Trip("armed")
        return grad, None


class BackwardTripwire(nn.Module):
    """Raises in backward, between the gradients of its two layers, when armed."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.armed = linear(), linear(), False

    def forward(self, x):
        return self.after(FailingIdentity.apply(torch.tanh(self.before(x)), self))


@pytest.mark.parametrize("error", [Trip, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_exception_in_the_middle_of_forward(error, config, checkpointing):
    def script(trainer, optimizer):
        losses = train(trainer, steps=1)
        for _ in range(2):
            trip_forward(trainer, 1, error)
            losses += train(trainer, steps=1, first=1)
        return losses

    testing.compare(lambda: Stack([mlp(), Tripwire(error), mlp()], checkpointing), config, script)


def trip_forward(trainer, block=0, error=Trip):
    trainer.module.blocks[block].armed = True
    with pytest.raises(error, match="armed"):
        trainer(normal(2, 3, WIDTH))


def trip_backward(trainer, block):
    loss = mean_square(trainer(normal(2, 3, WIDTH)))
    trainer.module.blocks[block].armed = True
    with pytest.raises(Trip, match="armed"):
        trainer.backward(loss)
    assert not trainer.module.blocks[block].armed


def test_exception_in_the_very_first_forward(config):
    def script(trainer, optimizer):
        trip_forward(trainer)
        return train(trainer)

    testing.compare(lambda: Stack([Tripwire(), mlp()]), config, script)


@pytest.mark.parametrize("error", [Trip, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_exception_in_eval(error, config):
    def script(trainer, optimizer):
        losses = train(trainer, steps=1)
        with torch.no_grad():
            trip_forward(trainer, 0, error)
        return losses + train(trainer, steps=2, first=1)

    testing.compare(lambda: Stack([Tripwire(error), mlp()]), config, script)


def assert_failure_leaves_no_trace(build, config):
    """Assert that steps around a backward that failed in the second block equal those of a run without it."""
    runs = []

    def script(trainer, optimizer, failing):
        losses = train(trainer, steps=1)
        for step in range(1, 3):
            if failing:
                trip_backward(trainer, 1)
                optimizer.zero_grad()
            losses += train(trainer, steps=1, first=step)
        runs.append([*losses, *trainer.state_dict().values()])
        return losses

    for failing in (False, True):
        testing.compare(build, config, lambda *trainer, failing=failing: script(*trainer, failing))
    for found in runs[1:]:
        testing.assert_same_bits(runs[0], found, "steps around the failure")


def test_exception_in_backward(config, checkpointing):
    assert_failure_leaves_no_trace(lambda: Stack([mlp(), BackwardTripwire(), mlp()], checkpointing), config)


def test_exception_in_the_first_backward(config):
    def script(trainer, optimizer):
        trip_backward(trainer, 0)
        optimizer.zero_grad()
        return train(trainer)

    testing.compare(lambda: Stack([BackwardTripwire(), mlp()]), config, script)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_exception_in_a_recomputed_forward(way, config):
    """The forward succeeds; its recomputation inside backward raises."""
    assert_failure_leaves_no_trace(lambda: Stack([mlp(), Tripwire(), mlp()], way), config)


def test_exception_between_micro_batches_keeps_earlier_gradients(config):
    """The first micro-batch's gradients survive an exception in the second one's forward."""

    def script(trainer, optimizer):
        losses = train(trainer, steps=1)
        first, second = normal_batches(2)
        trainer.backward(mean_square(trainer(*first)))
        trainer.module.blocks[1].armed = True
        with pytest.raises(Trip, match="armed"):
            trainer(*second)
        losses.append(update(trainer, optimizer, mean_square(trainer(*second))))
        return losses + train(trainer, steps=1)

    testing.compare(lambda: Stack([mlp(), Tripwire(), mlp()]), config, script)


def test_an_exception_that_the_model_catches(config, checkpointing):
    """The block's error is caught, and another branch is taken."""

    def forward(m, x):
        m.wire.armed = True
        try:
            return m.wire(x)
        except Trip:
            return m.otherwise(x)

    recovering = module(forward, wire=Tripwire, otherwise=linear)
    testing.assert_exact(lambda: Stack([recovering(), mlp()], checkpointing), normal_batches(), config)


def test_wrong_input_shape_then_training(config):
    def script(trainer, optimizer):
        with pytest.raises(RuntimeError):
            trainer(normal(2, 3, WIDTH + 1))
        losses = train(trainer, steps=1)
        with pytest.raises(RuntimeError):
            trainer(normal(2, 3, WIDTH + 1))
        return losses + train(trainer, steps=2, first=1)

    testing.compare(lambda: Stack([mlp()]), config, script)
