"""Other threads wait for the engine: what they read is of a whole step, and training has the same bits."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from probes import wait_until_another_waits
from seeded import engine_of, reference_of
from toys import inputs, layers, mean_square, train

import patrickstar as ps
from patrickstar._autograd import engine_lock

from .models import config

WIDTH = 16
DATA = inputs(4, WIDTH)
OPTIONS = config("fp32", 512)
READER = "reader"


def build():
    return layers(WIDTH, 4, torch.nn.Tanh)


def new_engine(device: str = "cpu") -> ps.Engine:
    return engine_of(build, OPTIONS.model_copy(update={"device": device}), evict_everything=True)


def gradients(engine: ps.Engine) -> dict[str, torch.Tensor]:
    """Return the gradients that exist; a step may use one between two calls."""
    found = {}
    for name, param in engine.module.named_parameters():
        with suppress(ps.errors.TrainingError):
            if (grad := param.grad) is not None:
                found[name] = grad.clone()
    return found


def visible(engine: ps.Engine) -> dict[str, torch.Tensor]:
    """Return all that a logger or an evaluation sees of an engine."""
    module, state = engine.module, engine.optimizer.state
    params, entries = dict(module.named_parameters()), module.state_dict()
    assert len(engine.inspect().parameters) == len(params)
    with torch.no_grad():
        kinds = {
            "norm": {name: param.norm() for name, param in params.items()},
            "detached": {name: param.detach().clone() for name, param in params.items()},
            "gradient": gradients(engine),
            "entry": {name: entry.clone() for name, entry in entries.items()},
            "array": {name: torch.from_numpy(entry.numpy().copy()) for name, entry in entries.items()},
            "state": {n: state[p]["exp_avg"].clone() for n, p in params.items() if "exp_avg" in state[p]},
            "evaluation": {"": engine(*DATA[0])},
        }
    return {f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()}


def train_beside_a_reader(device: str) -> None:
    """Compare a training with one beside a thread that reads, and waits in each forward and backward."""
    engine, plain, ended, allowed = new_engine(device), new_engine(device), threading.Event(), []
    for batch in DATA:
        allowed.append(visible(plain))
        plain.backward(mean_square(plain(*batch)))
        allowed.append(visible(plain))
        plain.optimizer.step()
        allowed.append(visible(plain))
        plain.optimizer.zero_grad()

    def observe() -> list[dict[str, torch.Tensor]]:
        seen = []
        while not ended.is_set():
            seen.append(visible(engine))
        return seen

    def wait_for_reader(*args: torch.Tensor) -> None:
        if not threading.current_thread().name.startswith(READER):
            wait_until_another_waits(engine, reading)
            if torch.is_grad_enabled():
                args[-1].register_hook(wait_for_reader)

    engine.module[1].register_forward_hook(wait_for_reader)
    with ThreadPoolExecutor(1, READER) as executor:
        reading = executor.submit(observe)
        try:
            train(engine, DATA)
        finally:
            ended.set()
    for values_seen in reading.result():
        for name, value in values_seen.items():
            assert any(name in whole and torch.equal(value, whole[name]) for whole in allowed), f"{name} is torn"
    ps.testing.assert_same_bits(plain.state_dict(), engine.state_dict(), "parameters")
    engine.close()
    plain.close()


def test_a_reader_sees_whole_steps_and_changes_nothing():
    train_beside_a_reader("cpu")


def test_engines_in_two_threads_are_independent_and_a_thread_can_use_one_that_another_created():
    expected = train(reference_of(build, OPTIONS), DATA)
    engines, together = [new_engine() for _ in range(2)], threading.Barrier(2)

    def run(engine):
        losses = []
        for batch in DATA:
            together.wait()
            losses += train(engine, [batch])
        return losses

    with ThreadPoolExecutor(2) as executor:
        for losses in executor.map(run, engines):
            ps.testing.assert_same_bits(expected, losses, "losses")
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_waiting_for_a_thread_that_needs_the_engine_is_refused(where, monkeypatch):
    monkeypatch.setattr(engine_lock, "PATIENCE_S", 0.01)
    monkeypatch.setattr(engine_lock, "POLL_S", 0.02)
    engine = new_engine()

    def log(*_: object) -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(lambda: engine.module[3][0].weight.norm()).result()

    def after_forward(module, args, out):
        log() if where == "forward" else out.register_hook(log)

    handle = engine.module[1].register_forward_hook(after_forward)
    message = r"parameter '3\.0\.weight' is used in thread 'ThreadPool.*' while thread 'MainThread' uses the engine"
    with pytest.raises(ps.errors.TrainingError, match=message):
        train(engine, DATA[:1])
    handle.remove()
    engine.optimizer.zero_grad()
    ps.testing.assert_same_bits(train(reference_of(build, OPTIONS), DATA), train(engine, DATA), "losses")
    engine.close()


def test_a_backward_without_the_engine_holds_it_to_its_end():
    engine, order, readings = new_engine(), [], []
    weight = engine.module[0][0].weight

    def slow(_: torch.Tensor) -> None:
        readings.append(executor.submit(lambda: (weight.grad is not None, order.append("read"))))
        wait_until_another_waits(engine, readings[-1])
        order.append("backward")

    for fails in (False, True):
        with ThreadPoolExecutor(1) as executor:
            hidden = engine.module[:2](*DATA[0])
            hidden.register_hook(slow)
            if fails:
                hidden.register_hook(lambda _: 1 / 0)
            try:
                mean_square(engine.module[2:](hidden)).backward()
            except ZeroDivisionError:
                assert fails
        assert order == ["backward", "read"]
        assert readings[-1].result()[0] != fails
        order.clear()
        engine.optimizer.zero_grad()
    engine.close()
