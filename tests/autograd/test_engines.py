"""Two engines in one process are independent."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import TrainingError

from .zoo import Stack, linear, mlp, normal_batches, train, trains, update


def other_model():
    return nn.Sequential(mlp(), mlp())


@trains(lambda: Stack([mlp(), linear()]))
def test_interleaved_steps(trainer, optimizer, config):
    """Each part of one engine's step runs between two parts of the other's."""
    other, other_optimizer = ps.initialize(other_model, config)
    for (x,) in normal_batches():
        first, second = mean_square(trainer(x)), mean_square(other(x))
        trainer.backward(first)
        other.backward(second)
        for method in ("step", "zero_grad"):
            getattr(optimizer, method)()
            getattr(other_optimizer, method)()
        yield from (first.detach(), second.detach())
    yield from other.state_dict().values()
    other.close()


@trains(lambda: Stack([mlp(), linear()]))
def test_an_engine_called_inside_anothers_forward(trainer, optimizer, config):
    """A managed teacher computes the targets while the student's graph is alive."""
    teacher, _ = ps.initialize(other_model, config)
    for (x,) in normal_batches():
        output = trainer(x)
        with torch.no_grad():
            target = teacher(x)
        yield update(trainer, optimizer, mean_square(output - target))
    teacher.close()


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


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_gan(precision, config):
    """A generator's gradients go through the discriminator as if this were frozen; its own are discarded."""
    options = config.model_copy(update={"precision": precision})

    def run(freezes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        generator, discriminator = (ps.initialize(other_model, options)[0] for _ in range(2))
        for (x,) in normal_batches():
            fake = generator(x)
            discriminator.backward(mean_square(discriminator(fake.detach())) - mean_square(discriminator(x)))
            discriminator.optimizer.step()
            discriminator.optimizer.zero_grad()
            discriminator.module.requires_grad_(not freezes)
            generator.backward(-mean_square(discriminator(fake)))
            discriminator.module.requires_grad_(True)
            generator.optimizer.step()
            generator.optimizer.zero_grad()
            if precision == "fp16" and not freezes:
                for call in (discriminator.optimizer.step, lambda: discriminator.clip_grad_norm_(1.0)):
                    with pytest.raises(TrainingError, match=r"not multiplied by its engine's loss scale.*zero_grad"):
                        call()
            discriminator.optimizer.zero_grad()
        states = [value for engine in (generator, discriminator) for value in engine.state_dict().values()]
        generator.close()
        discriminator.close()
        return states

    testing.assert_same_bits(run(True), run(False), "parameters")
