"""Common uses of gradients and of the optimizer."""

import pytest
import torch
from torch.optim import lr_scheduler
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import PatrickStarError

from .zoo import Stack, compare_steps, linear, mlp, normal_batches, small_chunks, train, update


def build():
    return Stack([mlp(), linear()])


def without_decay_on_vectors(model):
    """Return the usual two groups; one has its own learning rate."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}]


@pytest.mark.parametrize("max_norm", [1e-3, 1e3], ids=["clipped", "left alone"])
def test_clipping_by_global_norm(max_norm, config, checkpointing):
    testing.assert_exact(lambda: Stack([mlp(), linear()], checkpointing), normal_batches(), config, max_norm=max_norm)


def test_the_norm_that_clipping_returns(config):
    def step(trainer, optimizer, x):
        trainer.backward(mean_square(trainer(x)))
        norm = torch.as_tensor(trainer.clip_grad_norm_(1e-2)).clone()
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        return [norm]

    compare_steps(build, config, step)


def test_a_parameter_in_no_group_stays_as_it_is(precision):
    def weights_of_blocks(model):
        return [{"params": list(model.blocks.parameters())}]

    def script(trainer, optimizer):
        before = {name: value.clone() for name, value in trainer.state_dict().items()}
        losses = train(trainer)
        after = trainer.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("blocks"))
        return losses

    testing.compare(build, small_chunks(precision, param_groups=weights_of_blocks), script)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "LambdaLR, warm-up from zero": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedule(name, precision):
    def script(trainer, optimizer):
        scheduler, seen = SCHEDULERS[name](getattr(optimizer, "inner", optimizer)), []
        for (x,) in normal_batches(4):
            seen += [update(trainer, optimizer, mean_square(trainer(x))), torch.tensor(scheduler.get_last_lr())]
            scheduler.step()
        return seen

    testing.compare(build, small_chunks(precision, param_groups=without_decay_on_vectors), script)


def test_zeroing_before_backward_instead_of_after_the_step(config):
    def step(trainer, optimizer, x):
        optimizer.zero_grad()
        loss = mean_square(trainer(x))
        trainer.backward(loss)
        optimizer.step()
        return [loss.detach()]

    compare_steps(build, config, step)


def assert_gradients_are_correct_or_raise(trainer):
    for name, param in trainer.module.named_parameters():
        expected = trainer.gradient(name)
        try:
            gradient = param.grad
        except PatrickStarError as error:
            assert name in str(error)
        else:
            assert gradient is None or torch.equal(gradient.float(), expected), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_reading_a_gradient_never_gives_wrong_data(accumulation, config):
    """`p.grad` is always correct, None, or raises an error that names the parameter."""

    def step(trainer, optimizer, x):
        assert_gradients_are_correct_or_raise(trainer)
        for sign in [1, -1][:accumulation]:
            trainer.backward(mean_square(trainer(sign * x)))
            assert_gradients_are_correct_or_raise(trainer)
        gradients = [trainer.gradient(name) for name, _ in trainer.module.named_parameters()]
        optimizer.step()
        assert_gradients_are_correct_or_raise(trainer)
        optimizer.zero_grad()
        return gradients

    compare_steps(build, config, step)


def test_an_assigned_gradient_is_not_silently_lost(config):
    """Assigning `p.grad` affects the step, or raises an error that names the parameter."""
    engine, optimizer = ps.initialize(build, config)
    train(engine, steps=1)
    weight = engine.module.head.weight
    before = engine.state_dict()["head.weight"].clone()
    try:
        weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
        optimizer.step()
    except PatrickStarError as error:
        assert "head.weight" in str(error)
    else:
        assert not torch.equal(before, engine.state_dict()["head.weight"])
