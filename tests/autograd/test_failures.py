"""After an exception at any point the engine can continue to train, as plain PyTorch can."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square

from patrickstar import testing

from .zoo import WIDTH, Stack, call_block, linear, mlp, normal, normal_batches, train, update


class Trip(RuntimeError):
    pass


class Tripwire(nn.Module):
    """Raises in forward at a given call, when armed."""

    def __init__(self, error=Trip):
        super().__init__()
        self.before, self.after = linear(), linear()
        self.error, self.calls_left = error, None

    def forward(self, x):
        x = torch.tanh(self.before(x))
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.calls_left = None
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
        for (x,) in normal_batches(2):
            trainer.module.blocks[1].calls_left = 0
            with pytest.raises(error, match="armed"):
                trainer(x)
            losses += train(trainer, steps=1, first=1)
        return losses

    testing.compare(lambda: Stack([mlp(), Tripwire(error), mlp()], checkpointing), config, script)


def test_exception_in_the_very_first_forward(config):
    def script(trainer, optimizer):
        trainer.module.blocks[0].calls_left = 0
        with pytest.raises(Trip, match="armed"):
            trainer(normal(2, 3, WIDTH))
        return train(trainer)

    testing.compare(lambda: Stack([Tripwire(), mlp()]), config, script)


@pytest.mark.parametrize("error", [Trip, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_exception_in_eval(error, config):
    def script(trainer, optimizer):
        losses = train(trainer, steps=1)
        trainer.module.blocks[0].calls_left = 0
        with torch.no_grad(), pytest.raises(error, match="armed"):
            trainer(normal(2, 3, WIDTH))
        return losses + train(trainer, steps=2, first=1)

    testing.compare(lambda: Stack([Tripwire(error), mlp()]), config, script)


def assert_failure_leaves_no_trace(build, config, fail):
    """Assert that steps around a failed, discarded step equal those of a run without it."""
    runs = []

    def script(trainer, optimizer, failing):
        losses = train(trainer, steps=1)
        for step in range(1, 3):
            if failing:
                fail(trainer)
                optimizer.zero_grad()
            losses += train(trainer, steps=1, first=step)
        runs.append([*losses, *trainer.state_dict().values()])
        return losses

    for failing in (False, True):
        testing.compare(build, config, lambda *trainer, failing=failing: script(*trainer, failing))
    for found in runs[1:]:
        testing.assert_same_bits(runs[0], found, "steps around the failure")


def test_exception_in_backward(config, checkpointing):
    def fail(trainer):
        loss = mean_square(trainer(normal(2, 3, WIDTH)))
        trainer.module.blocks[1].armed = True
        with pytest.raises(Trip, match="armed"):
            trainer.backward(loss)
        assert not trainer.module.blocks[1].armed

    assert_failure_leaves_no_trace(lambda: Stack([mlp(), BackwardTripwire(), mlp()], checkpointing), config, fail)


def test_exception_in_the_first_backward(config):
    def script(trainer, optimizer):
        loss = mean_square(trainer(normal(2, 3, WIDTH)))
        trainer.module.blocks[0].armed = True
        with pytest.raises(Trip, match="armed"):
            trainer.backward(loss)
        optimizer.zero_grad()
        return train(trainer)

    testing.compare(lambda: Stack([BackwardTripwire(), mlp()]), config, script)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_exception_in_a_recomputed_forward(way, config):
    """The forward succeeds; its recomputation inside backward raises."""

    def fail(trainer):
        loss = mean_square(trainer(normal(2, 3, WIDTH)))
        trainer.module.blocks[1].calls_left = 0
        with pytest.raises(Trip, match="armed"):
            trainer.backward(loss)

    assert_failure_leaves_no_trace(lambda: Stack([mlp(), Tripwire(), mlp()], way), config, fail)


def test_exception_between_micro_batches_keeps_earlier_gradients(config):
    """The first micro-batch's gradients survive an exception in the second one's forward."""

    def script(trainer, optimizer):
        losses = train(trainer, steps=1)
        first, second = normal_batches(2)
        trainer.backward(mean_square(trainer(*first)))
        trainer.module.blocks[1].calls_left = 0
        with pytest.raises(Trip, match="armed"):
            trainer(*second)
        losses.append(update(trainer, optimizer, mean_square(trainer(*second))))
        return losses + train(trainer, steps=1)

    testing.compare(lambda: Stack([mlp(), Tripwire(), mlp()]), config, script)


class Recovering(nn.Module):
    """Catches its own block's error and takes another branch."""

    def __init__(self):
        super().__init__()
        self.wire, self.otherwise = Tripwire(), linear()

    def forward(self, x):
        self.wire.calls_left = 0
        try:
            return call_block(self.wire, x, "off")
        except Trip:
            return self.otherwise(x)


def test_an_exception_that_the_model_catches(config, checkpointing):
    testing.assert_exact(lambda: Stack([Recovering(), mlp()], checkpointing), normal_batches(), config)


def test_wrong_input_shape_then_training(config):
    def script(trainer, optimizer):
        with pytest.raises(RuntimeError):
            trainer(normal(2, 3, WIDTH + 1))
        losses = train(trainer, steps=1)
        with pytest.raises(RuntimeError):
            trainer(normal(2, 3, WIDTH + 1))
        return losses + train(trainer, steps=2, first=1)

    testing.compare(lambda: Stack([mlp()]), config, script)
