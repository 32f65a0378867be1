"""Unusual orders of calls, and two engines in one process: as plain PyTorch, or an explanatory error."""

import threading

import pytest
import torch
import torch.nn as nn
from toys import mean_square, update

import patrickstar as ps
from patrickstar.errors import ModelError, TrainingError

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, small_chunks, train, trains


def chain(checkpointing="off"):
    return Stack([nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3)], checkpointing)


def half_frozen():
    model = chain()
    model.blocks[1].requires_grad_(False)
    return model


def batch(number):
    return normal(2, 3, WIDTH) * (number + 1)


@trains(chain, small_chunks("bf16"))
def test_clipping_twice_clips_the_clipped_gradients(trainer, optimizer):
    trainer.backward(100 * mean_square(trainer(batch(0))))
    yield from [trainer.clip_grad_norm_(limit).clone() for limit in (1.0, 0.5)]
    yield from [trainer.gradient(name) for name, _ in trainer.module.named_parameters()]
    optimizer.step()


def test_backward_after_clipping_is_refused():
    with ps.testing.stressed(chain, small_chunks("bf16")) as engine:
        engine.backward(mean_square(engine(batch(0))))
        engine.clip_grad_norm_(1.0)
        loss = mean_square(engine(batch(1)))
        with pytest.raises(TrainingError, match="after the last backward"):
            engine.backward(loss)


@trains(chain, small_chunks("fp32"))
def test_loading_an_optimizer_that_had_not_stepped(trainer, optimizer):
    before = optimizer.state_dict()
    weights = {name: value.clone() for name, value in trainer.state_dict().items()}
    for number in range(2):
        if number:
            optimizer.load_state_dict(before)
            trainer.load_state_dict(weights)
        yield update(trainer, mean_square(trainer(batch(0))))


@trains(half_frozen, small_chunks("bf16"))
def test_unfreezing_under_inference_mode(trainer, optimizer):
    trainer.module.blocks[1].requires_grad_(False)
    yield update(trainer, mean_square(trainer(batch(0))))
    trainer.module.blocks[1].requires_grad_(True)
    with torch.inference_mode():
        seen = trainer(batch(1)).clone()
    yield update(trainer, mean_square(trainer(batch(2))))
    yield seen.sum()


def test_unfreezing_in_the_middle_of_a_step_is_refused_by_name():
    with ps.testing.stressed(half_frozen, small_chunks("bf16")) as engine:
        engine(batch(0))
        engine.module.blocks[1].requires_grad_(True)
        with pytest.raises(ModelError, match=r"blocks\.1\.0\.weight.*middle of a step"):
            engine(batch(1))


@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant"])
@trains(lambda checkpointing: chain(checkpointing), small_chunks("bf16"))
def test_backward_in_another_thread(trainer, optimizer):
    """As on a GPU, where autograd uses its own thread."""
    for number in range(2):
        loss = mean_square(trainer(batch(number)))
        worker = threading.Thread(target=trainer.backward, args=(loss,))
        worker.start()
        worker.join()
        optimizer.step()
        yield loss.detach()


def test_a_refusal_half_way_leaves_the_model_usable():
    with torch.device("meta"):
        module = chain()
    state = chain().state_dict()

    def failing(name):
        if name == "blocks.1.0.weight":
            raise OSError("the file ends here")
        return state[name]

    with pytest.raises(OSError, match="ends here"):
        ps.initialize(module, small_chunks("bf16"), weights=failing)
    engine, _ = ps.initialize(module, small_chunks("bf16"), weights=state.__getitem__)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, state[name]), name
    engine.close()


def test_backward_after_close_is_an_error_that_names_a_parameter():
    engine, _ = ps.initialize(chain, small_chunks("bf16"))
    loss = mean_square(engine(batch(0)))
    engine.close()
    with pytest.raises(TrainingError, match=r"head\..*closed"):
        loss.backward()


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
        yield update(trainer, mean_square(output - target))
    teacher.close()


def test_one_engine_after_another_over_one_module(config):
    """A closed engine leaves a plain module, which another engine can manage."""
    torch.manual_seed(0)
    module = other_model()
    first, _ = ps.initialize(module, config)
    train(first)
    trained = first.state_dict()
    first.close()
    ps.testing.assert_same_bits(trained, dict(module.state_dict()), "parameters of the module that was let go")
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
            update(discriminator, mean_square(discriminator(fake.detach())) - mean_square(discriminator(x)))
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

    ps.testing.assert_same_bits(run(True), run(False), "parameters")
