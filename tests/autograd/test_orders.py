"""Unusual orders of calls: each behaves as plain PyTorch, or raises an explanatory error."""

import threading

import pytest
import torch
import torch.nn as nn
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import ModelError, TrainingError

from .zoo import WIDTH, Stack, linear, normal, small_chunks, trains, update


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
    with testing.stressed(chain, small_chunks("bf16")) as engine:
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
        yield update(trainer, optimizer, mean_square(trainer(batch(0))))


@trains(half_frozen, small_chunks("bf16"))
def test_unfreezing_under_inference_mode(trainer, optimizer):
    trainer.module.blocks[1].requires_grad_(False)
    yield update(trainer, optimizer, mean_square(trainer(batch(0))))
    trainer.module.blocks[1].requires_grad_(True)
    with torch.inference_mode():
        seen = trainer(batch(1)).clone()
    yield update(trainer, optimizer, mean_square(trainer(batch(2))))
    yield seen.sum()


def test_unfreezing_in_the_middle_of_a_step_is_refused_by_name():
    with testing.stressed(half_frozen, small_chunks("bf16")) as engine:
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
