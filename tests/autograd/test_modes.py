"""Evaluation at any time, and batches with changing shapes."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square, module

from patrickstar import testing

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, train


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def without_grad(request):
    return request.param


with_dropout = module(
    lambda m, x: x + m.layers(x), layers=lambda: nn.Sequential(linear(), nn.Dropout(0.3), nn.LayerNorm(WIDTH), linear())
)


def build(checkpointing="off"):
    return Stack([with_dropout(), mlp()], checkpointing)


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

    testing.compare(lambda: build(checkpointing), config, script)


def test_eval_at_any_time(without_grad, config, checkpointing):
    """Between forward, backward and step: gradients are stored in place of the weights that evaluation needs."""

    def script(trainer, optimizer):
        seen = []
        for step in range(3):
            for (x,) in normal_batches(1 + step % 2):
                loss = mean_square(trainer(x + step))
                seen.append(evaluate(trainer, without_grad))
                trainer.backward(loss)
                seen += [loss.detach(), evaluate(trainer, without_grad)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    testing.compare(lambda: build(checkpointing), config, script)


def test_forward_with_grad_in_eval_mode(config):
    """Fine-tuning with dropout off."""

    def script(trainer, optimizer):
        trainer.module.eval()
        return train(trainer)

    testing.compare(build, config, script)


def test_no_grad_inside_forward(config):
    """A feature extractor runs without gradients although its weights are trainable."""

    def forward(m, x):
        with torch.no_grad():
            features = m.features(x)
        return m.body(features) + m.features(x)

    build = module(forward, features=mlp, body=mlp)
    testing.assert_exact(lambda: Stack([build()]), normal_batches(), config)


def test_another_shape_at_each_step(config, checkpointing):
    shapes = [(2, 3), (2, 7), (1, 1), (3, 3), (2, 7)]
    batches = [(normal(batch, length, WIDTH, seed=length),) for batch, length in shapes]
    testing.assert_exact(lambda: build(checkpointing), batches, config)


def test_another_depth_at_each_step(config):
    """The number of layers that run is an input."""

    def forward(m, x, times):
        for _ in range(times):
            x = m.block(x)
        return m.head(x)

    batches = [(*batch, times) for batch, times in zip(normal_batches(4), [2, 0, 3, 1], strict=True)]
    testing.assert_exact(module(forward, block=mlp, head=linear), batches, config)
