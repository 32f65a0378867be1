"""Law 1 with a disk: loops that read, write or branch while updates of the last step are deferred."""

import copy
import functools

import pytest
import torch
from probes import loss_scaler_of
from toys import mean_square, module, train

import patrickstar as ps

from .tiers import Room, blocks, compare, inputs, on_disk, options

ROOMS = {
    "least": Room(),
    "everything evicted": Room(host_bytes=20000, evict_everything=True),
    "part on the host": Room(device_bytes=12000, host_share=0.5),
}


@pytest.fixture(params=ROOMS.values(), ids=ROOMS.keys())
def room(request):
    return request.param


@pytest.fixture
def exact(tmp_path, room):
    """Return a function that compares a script over a model with the reference."""

    def run(script, build=blocks, batch=None, **more):
        chosen = on_disk(build, options(**more), tmp_path, batch or inputs(1)[0], room)
        compare(build, chosen, script, evict_everything=room.evict_everything)
        assert not list(tmp_path.iterdir())

    return run


def usual(trainer, optimizer, count=3):
    return train(trainer, inputs(count))


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_with_a_short_last_batch_and_clipping(exact, accumulation):
    def script(trainer, optimizer):
        results = []
        for number, batch in enumerate(batches := inputs(3 * accumulation - 1), start=1):
            loss = mean_square(trainer(*batch))
            trainer.backward(loss / accumulation)
            results.append(loss.detach().clone())
            if number % accumulation == 0 or number == len(batches):
                results += [trainer.gradient(name) for name, _ in trainer.module.named_parameters()]
                results.append(trainer.clip_grad_norm_(0.05).clone())
                optimizer.step()
        return results

    exact(script)


def states_saved_and_loaded_right_after(trainer, optimizer):
    """Saved states include deferred updates, which are not applied again to loaded states."""
    usual(trainer, optimizer, 2)
    states = copy.deepcopy(optimizer.state_dict()["state"])
    yield from list(trainer.state_dict().values())
    usual(trainer, optimizer, 1)
    saved = copy.deepcopy((trainer.state_dict(), optimizer.state_dict()))
    yield from usual(trainer, optimizer, 2)
    # The optimizers of torch update the loaded tensors in place.
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    trainer.load_state_dict(saved[0])
    yield from usual(trainer, optimizer, 1)
    trainer.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    yield from usual(trainer, optimizer, 2)
    yield from [states[i][kind] for i in sorted(states) for kind in ("exp_avg", "exp_avg_sq", "step")]


def a_changed_learning_rate(trainer, optimizer):
    """It applies to the next step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(getattr(optimizer, "inner", optimizer), 0.1)
    for batch in inputs(4):
        yield from train(trainer, [batch])
        schedule.step()


def written_parameters(trainer, optimizer):
    for batch in inputs(3):
        yield from train(trainer, [batch])
        with torch.no_grad():
            trainer.module[0][0].weight.mul_(1.5)
            trainer.module[3][0].bias.zero_()
            trainer.module[5][0].weight.copy_(trainer.module[4][0].weight.detach().clone())


def evaluations(trainer, optimizer):
    for batch in inputs(3):
        yield from train(trainer, [batch])
        trainer.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = trainer(*batch).clone()
            yield output
        trainer.train()


def other_batches_and_steps(trainer, optimizer):
    """Change the batch size, drop gradients, and call a step without gradients."""
    yield from usual(trainer, optimizer, 2)
    for rows in (1, 7, 3, 7):
        yield from train(trainer, inputs(2, rows=rows))
    trainer.backward(mean_square(trainer(*inputs(1)[0])))
    optimizer.zero_grad()
    yield from usual(trainer, optimizer, 2)
    optimizer.step()
    yield from usual(trainer, optimizer, 1)


def reads_of_gradients(trainer, optimizer):
    for batch in inputs(3):
        trainer.backward(mean_square(trainer(*batch)))
        optimizer.step()
        yield torch.tensor([trainer.gradient(name) is None for name, _ in trainer.module.named_parameters()])
        for param in trainer.module.parameters():
            param.grad = None


SCRIPTS = a_changed_learning_rate, written_parameters, evaluations, other_batches_and_steps, reads_of_gradients
SCRIPTS += (states_saved_and_loaded_right_after,)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_what_follows_a_step_changes_no_deferred_update(exact, script):
    exact(lambda trainer, optimizer: list(script(trainer, optimizer)))


def branches(m, x):
    """Use the blocks in `used` only."""
    for number in m.used:
        x = m.blocks[number](x)
    return x


with_branches = module(branches, blocks=blocks, used=lambda: range(6))


@pytest.mark.parametrize("how", [{}, {"update": True}])
def test_updates_of_a_branch_stay_deferred_until_it_is_used(exact, how):
    def script(trainer, optimizer):
        results = []
        used = [range(6), [0, 5], [0, 5], [1, 0, 5], range(6), [2], [3], [4, 2], range(6), [5, 0]]
        for blocks_taken, batch in zip(used, inputs(len(used)), strict=True):
            trainer.module.used = blocks_taken
            results += train(trainer, [batch], **how if results and len(blocks_taken) < 3 else {})
        return results

    exact(script, with_branches)


def test_freezing_and_unfreezing_right_after_a_step(exact):
    def build():
        model = blocks()
        model[0].requires_grad_(False)
        model[4].requires_grad_(False)
        return model

    def script(trainer, optimizer):
        results = usual(trainer, optimizer, 2)
        trainer.module[1].requires_grad_(False)
        results += usual(trainer, optimizer, 2)
        trainer.module[0].requires_grad_(True)
        results += usual(trainer, optimizer, 2)
        trainer.module[1].requires_grad_(True)
        trainer.module[4].requires_grad_(True)
        return results + usual(trainer, optimizer, 3)

    exact(script, build)


class Trip(RuntimeError):
    pass


def trip(*args):
    raise Trip


def trip_in_backward(module, args, output):
    output.register_hook(trip)


@pytest.mark.parametrize("hook", [trip, trip_in_backward], ids=["forward", "backward"])
def test_training_can_continue_after_an_exception_of_the_user(exact, hook):
    def script(trainer, optimizer):
        results = usual(trainer, optimizer, 1)
        for _ in range(2):
            handle = trainer.module[3].register_forward_hook(hook)
            with pytest.raises(Trip):
                usual(trainer, optimizer, 1)
            handle.remove()
            optimizer.zero_grad()
            results += usual(trainer, optimizer, 2)
        return results

    exact(script)


OPTIMIZERS = {
    "SGD": ps.SGD(lr=0.1, momentum=0.9),
    "SGD without momentum": ps.SGD(lr=0.1),
    "Lion": ps.Lion(lr=1e-2),
    "EMA": ps.EMA(ps.AdamW(lr=1e-2), decay=0.9),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_other_optimizers(exact, optimizer):
    exact(usual, lambda: blocks(10), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])
def test_param_groups(exact, optimizer):
    def groups(module):
        first, rest = list(module[:3].parameters()), list(module[3:].parameters())
        return [{"params": first, "lr": 1e-3}, {"params": rest}]

    chosen = options(optimizer=OPTIMIZERS.get(optimizer, ps.AdamW(lr=1e-2))).optimizer
    exact(usual, lambda: blocks(10), optimizer=chosen.model_copy(update={"param_groups": groups}))


def test_overflow_in_fp16(exact):
    def script(trainer, optimizer):
        scaler = loss_scaler_of(trainer) if isinstance(trainer, ps.Engine) else trainer.scaler
        results = usual(trainer, optimizer, 1)
        scaler.scale = 2.0**40
        results += usual(trainer, optimizer, 2)
        assert scaler.scale == 2.0**38, "both steps overflowed"
        scaler.scale = 2.0**10
        return results + usual(trainer, optimizer, 2)

    exact(script, precision="fp16")
