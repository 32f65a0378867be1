"""Two engines in one process are independent."""

import torch
import torch.nn as nn
from toys import mean_square

import patrickstar as ps
from patrickstar import testing

from .zoo import Stack, linear, mlp, normal_batches, train, update


def other_model():
    return nn.Sequential(mlp(), mlp())


def test_interleaved_steps(config):
    """Each part of one engine's step runs between two parts of the other's."""

    def script(trainer, optimizer):
        other, other_optimizer = ps.initialize(other_model, config)
        losses = []
        for (x,) in normal_batches():
            first = mean_square(trainer(x))
            second = mean_square(other(x))
            trainer.backward(first)
            other.backward(second)
            optimizer.step()
            other_optimizer.step()
            optimizer.zero_grad()
            other_optimizer.zero_grad()
            losses += [first.detach(), second.detach()]
        losses += list(other.state_dict().values())
        other.close()
        return losses

    testing.compare(lambda: Stack([mlp(), linear()]), config, script)


def test_an_engine_called_inside_anothers_forward(config):
    """A managed teacher computes the targets while the student's graph is alive."""

    def script(trainer, optimizer):
        teacher, _ = ps.initialize(other_model, config)
        losses = []
        for (x,) in normal_batches():
            output = trainer(x)
            with torch.no_grad():
                target = teacher(x)
            losses.append(update(trainer, optimizer, mean_square(output - target)))
        teacher.close()
        return losses

    testing.compare(lambda: Stack([mlp(), linear()]), config, script)


def test_one_engine_after_another_over_one_module(config):
    """A closed engine leaves a plain module, which another engine can manage."""
    torch.manual_seed(0)
    module = other_model()
    first, _ = ps.initialize(module, config)
    train(first)
    trained = first.state_dict()
    first.close()
    testing.assert_same_bits(trained, dict(module.state_dict()), "parameters of the module that was let go")
    assert module(normal_batches(1)[0][0]).isfinite().all()

    second, _ = ps.initialize(module, config)
    assert all(loss.isfinite() for loss in train(second))
    second.close()
