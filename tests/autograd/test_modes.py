"""Evaluation at any time, and batches with changing shapes."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square

from patrickstar import testing

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, train, update


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def without_grad(request):
    return request.param


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Dropout(0.3), nn.LayerNorm(WIDTH), linear())

    def forward(self, x):
        return x + self.layers(x)


def evaluate(trainer, without_grad):
    """Return an output in eval mode as an ordinary tensor."""
    was_training = trainer.module.training
    trainer.module.eval()
    with without_grad():
        output = trainer(normal(4, 2, WIDTH, seed=7))
    trainer.module.train(was_training)
    assert not output.requires_grad
    return torch.tensor(output.tolist())


def test_eval_before_the_first_step_and_between_steps(without_grad, config, checkpointing):
    def script(trainer, optimizer):
        seen = [evaluate(trainer, without_grad)]
        for step in range(3):
            seen += train(trainer, steps=1, first=step)
            seen += [evaluate(trainer, without_grad), evaluate(trainer, without_grad)]
        return seen

    testing.compare(lambda: Stack([WithDropout(), mlp()], checkpointing), config, script)


def test_eval_between_forward_and_backward(without_grad, config, checkpointing):
    def script(trainer, optimizer):
        seen = []
        for (x,) in normal_batches():
            loss = mean_square(trainer(x))
            seen += [evaluate(trainer, without_grad), update(trainer, optimizer, loss)]
        return seen

    testing.compare(lambda: Stack([WithDropout(), mlp()], checkpointing), config, script)


def test_eval_between_backward_and_step(without_grad, config, checkpointing):
    """Gradients are stored in place of the weights that evaluation needs."""

    def script(trainer, optimizer):
        seen = []
        for (x,) in normal_batches():
            loss = mean_square(trainer(x))
            trainer.backward(loss)
            seen += [loss.detach(), evaluate(trainer, without_grad)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    testing.compare(lambda: Stack([WithDropout(), mlp()], checkpointing), config, script)


def test_eval_between_micro_batches(without_grad, config):
    def script(trainer, optimizer):
        seen = []
        for step in range(2):
            for (x,) in normal_batches(2):
                loss = mean_square(trainer(x + step))
                trainer.backward(loss)
                seen += [loss.detach(), evaluate(trainer, without_grad)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    testing.compare(lambda: Stack([WithDropout(), mlp()]), config, script)


def test_forward_with_grad_in_eval_mode(config):
    """Fine-tuning with dropout off."""

    def script(trainer, optimizer):
        trainer.module.eval()
        return train(trainer)

    testing.compare(lambda: Stack([WithDropout(), mlp()]), config, script)


class PartlyWithoutGrad(nn.Module):
    """A feature extractor that runs without gradients although its weights are trainable."""

    def __init__(self):
        super().__init__()
        self.features, self.body = mlp(), mlp()

    def forward(self, x):
        with torch.no_grad():
            features = self.features(x)
        return self.body(features) + self.features(x)


def test_no_grad_inside_forward(config):
    testing.assert_exact(lambda: Stack([PartlyWithoutGrad()]), normal_batches(), config)


def test_another_shape_at_each_step(config, checkpointing):
    shapes = [(2, 3), (2, 7), (1, 1), (3, 3), (2, 7)]
    batches = [(normal(batch, length, WIDTH, seed=length),) for batch, length in shapes]
    testing.assert_exact(lambda: Stack([WithDropout(), mlp()], checkpointing), batches, config)


class RepeatsItsBlock(nn.Module):
    """The number of layers that run is an input."""

    def __init__(self):
        super().__init__()
        self.block, self.head = mlp(), linear()

    def forward(self, x, times):
        for _ in range(times):
            x = self.block(x)
        return self.head(x)


def test_another_depth_at_each_step(config):
    batches = [(*batch, times) for batch, times in zip(normal_batches(4), [2, 0, 3, 1], strict=True)]
    testing.assert_exact(RepeatsItsBlock, batches, config)
