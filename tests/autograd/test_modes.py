"""Evaluation at any time, and batches with changing shapes."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square, module

from patrickstar import testing

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, train, trains


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


@trains(lambda checkpointing: build(checkpointing))
def test_eval_at_any_time(trainer, optimizer, without_grad):
    """Before the first step, and between forward, backward and step, where gradients are in place of the weights."""
    yield evaluate(trainer, without_grad)
    for step in range(3):
        for (x,) in normal_batches(1 + step % 2):
            loss = mean_square(trainer(x + step))
            yield evaluate(trainer, without_grad)
            trainer.backward(loss)
            yield from (loss.detach(), evaluate(trainer, without_grad))
        optimizer.step()
        optimizer.zero_grad()
        yield from (evaluate(trainer, without_grad), evaluate(trainer, without_grad))


@trains(build)
def test_forward_with_grad_in_eval_mode(trainer, optimizer):
    """Fine-tuning with dropout off."""
    trainer.module.eval()
    return train(trainer)


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
