"""Law: a step returns while its updates run, and whoever looks at a parameter waits for its own update alone."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import strict_device
import torch
import toys
from probes import manager_of, optimizer_step_of
from seeded import engine_of, run_step
from torch import nn

import patrickstar as ps
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.streamed_update import StreamedUpdates

WIDTH, LAYERS = 64, 8
build = partial(toys.layers, WIDTH, LAYERS, nn.GELU)
FIRST, LAST = "0.0.weight", f"{LAYERS - 1}.0.weight"


class Gate:
    """Lets the updates of an engine begin one by one, of those that threads have taken the first submitted one."""

    def __init__(self, engine: ps.Engine) -> None:
        self.engine = engine
        self._permits = threading.Semaphore(0)
        self._closed = False
        self._waiting: list = []
        streamed = optimizer_step_of(engine).updates.host.streamed
        self._run, streamed._run = streamed._run, self._wait_and_run

    def _wait_and_run(self, update) -> None:
        while update.job is None:
            time.sleep(0.001)
        self._waiting.append(update)
        while self._closed and not (self._is_first(update) and self._permits.acquire(timeout=0.01)):
            time.sleep(0.001)
        self._waiting.remove(update)
        self._run(update)

    def _is_first(self, update) -> bool:
        return update is min(list(self._waiting), key=lambda waiting: waiting.job._number)

    @property
    def updating(self) -> list[str]:
        """Names of the parameters whose update is in progress."""
        return [param.name for param in self.engine.inspect().parameters if param.update_pending]

    def close(self) -> None:
        self._closed = True

    def let(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        self._closed = False

    def open_later(self) -> threading.Timer:
        timer = threading.Timer(0.1, self.open)
        timer.start()
        return timer


def batch(seed: int = 5) -> torch.Tensor:
    return toys.inputs(1, width=WIDTH, rows=32, seed=seed)[0][0].to("strict")


@contextmanager
def after_a_step(
    device_memory: str = "8MiB",
    *,
    update: bool | ps.InBackward = False,
    host_memory: int | str = "8MiB",
    gated: bool = True,
    **options,
) -> Iterator[tuple[ps.Engine, Gate]]:
    """Return an engine after its third step, none of whose updates has begun if they are `gated`.

    Args:
        device_memory: By default parameters stay on the device; the states are on the host.
        update: Of this backward, or of all.
    """
    strict_device.configure(seed=1)
    optimizer = ps.EMA(ps.AdamW(lr=1e-2), decay=0.9)
    budgets = dict(device_memory=device_memory, host_memory=host_memory)
    if always := isinstance(update, ps.InBackward):
        options["update"] = update
    config = ps.Config(device="strict", chunk_size="9KiB", optimizer=optimizer, **budgets, **options)
    hooks = dict(page_bytes=4096, speculates=False)
    with engine_of(build, config, **hooks) as engine:
        gate = Gate(engine)
        for number in range(3):
            if number == 2 and gated:
                optimizer_step_of(engine).complete()
                gate.close()
            run_step(engine, (batch(),), **({} if always else {"update": update}))
        try:
            yield engine, gate
        finally:
            gate.open()


def param(engine: ps.Engine, name: str) -> nn.Parameter:
    return dict(engine.module.named_parameters())[name]


@pytest.mark.parametrize("update", [False, True], ids=["in the step", "in backward"])
def test_a_step_returns_while_its_updates_run(update):
    with after_a_step("120KiB", update=update) as (_, gate):
        assert len(gate.updating) == 2 * LAYERS


def test_an_operator_waits_for_its_own_parameters_alone():
    """Updates run in the order of the next forward, and layers compute while later ones are updated."""
    with after_a_step("120KiB") as (engine, gate):
        output = batch().bfloat16()
        for number in range(LAYERS):
            gate.let(1)
            output = engine.module[number](output)
            assert f"{number}.0.weight" not in gate.updating
            assert (LAST in gate.updating) == (number < LAYERS - 1)


def test_parameters_that_are_evicted_later_are_updated_in_their_host_copy():
    with after_a_step("60KiB") as (engine, gate):
        assert any(
            chunk.device.valid and chunk.host.update is not None for chunk in manager_of(engine).param16.values()
        )
        gate.open()
        before = engine.stats.total.d2h_bytes
        engine(batch())
        assert engine.stats.total.d2h_bytes == before, "both copies were valid"


def test_a_parameter_without_gradient_keeps_its_value_beside_updates_of_its_chunk():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.idle = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            return nn.functional.gelu(self.linear(x))

    def build():
        return nn.Sequential(*(Layer() for _ in range(LAYERS)))

    strict_device.configure(seed=1)
    config = ps.Config(device="strict", chunk_size="9KiB", device_memory="60KiB", host_memory="8MiB")
    with engine_of(build, config) as engine:
        for number in range(6):
            for layer in engine.module:
                with torch.no_grad():
                    layer.idle.add_(1)
            run_step(engine, (batch(),))
            for layer in engine.module:
                assert (layer.idle.detach().cpu() == number + 1).all()


def test_updates_that_have_ended_are_finished_without_a_wait():
    with after_a_step("120KiB") as (engine, gate):
        updates = optimizer_step_of(engine).updates
        gate.let(LAYERS - 1)
        last = [update.running for update in updates.queue.updates]
        for running in last[:-1]:
            running.job.wait()
        updates.progress()
        assert len(updates.queue.updates) == 1 and LAST in gate.updating and FIRST not in gate.updating


def weights(engine: ps.Engine) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in engine.module.state_dict().items()}


def flat_states(engine: ps.Engine) -> dict[str, torch.Tensor]:
    states = engine.optimizer.state_dict()["state"]
    return {f"{number} {key}": value for number, entry in states.items() for key, value in entry.items()}


def after(engine: ps.Engine, act: Callable[[], object]) -> dict[str, torch.Tensor]:
    act()
    return weights(engine) | flat_states(engine)


def saved(engine: ps.Engine, path: Path) -> dict[str, torch.Tensor]:
    engine.save(path)
    with after_a_step() as (other, _):
        return after(other, lambda: other.load(path))


def closed(engine: ps.Engine) -> dict[str, torch.Tensor]:
    engine.close()
    return weights(engine)


def averages(engine: ps.Engine) -> dict[str, torch.Tensor]:
    with engine.averaged():
        return weights(engine)


def train_on(engine: ps.Engine) -> None:
    engine.backward(engine(batch()).float().square().mean())
    engine.clip_grad_norm_(1e-3)
    engine.optimizer.step()


def assign_gradient(engine: ps.Engine) -> None:
    last = param(engine, LAST)
    last.grad = torch.ones_like(last)
    assert last.grad is not None
    engine.optimizer.step()


def write(engine: ps.Engine) -> None:
    with torch.no_grad():
        param(engine, LAST).add_(1)


def drop_duplicates(engine: ps.Engine) -> None:
    """Free all host copies of chunks that are on the device, also those that updates are writing."""
    host = manager_of(engine).host_tier
    duplicates = host._droppable()
    assert host.has_room(host.free_bytes + sum(chunk.nbytes for chunk in duplicates))


READS: dict[str, Callable[[ps.Engine, Path], dict[str, torch.Tensor]]] = {
    "parameter": lambda engine, _: {LAST: param(engine, LAST).clone()},
    "parameter.data": lambda engine, _: {LAST: param(engine, LAST).data.clone()},
    "module.state_dict": lambda engine, _: weights(engine),
    "engine.state_dict": lambda engine, _: engine.state_dict(),
    "optimizer.state": lambda engine, _: {
        key: value.clone() for key, value in engine.optimizer.state[param(engine, LAST)].items()
    },
    "optimizer.state_dict": lambda engine, _: flat_states(engine),
    "save": lambda engine, path: saved(engine, path / "saved"),
    "averages": lambda engine, _: averages(engine),
    "evaluation": lambda engine, _: {"output": engine(batch()).detach().clone()},
    "next step": lambda engine, _: after(engine, lambda: train_on(engine)),
    "empty step": lambda engine, _: after(engine, engine.optimizer.step),
    "write": lambda engine, _: after(engine, lambda: write(engine)),
    "assigned gradient": lambda engine, _: after(engine, lambda: assign_gradient(engine)),
    "loaded states": lambda engine, _: after(
        engine, lambda: engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    ),
    "host memory": lambda engine, _: after(engine, lambda: drop_duplicates(engine)),
    "close": lambda engine, _: closed(engine),
}


@pytest.mark.parametrize("room", ["60KiB", "120KiB", "8MiB"])
@pytest.mark.parametrize("name", READS)
def test_what_is_read_has_been_updated(name, room, tmp_path):
    """Every way to look at a parameter, its states or its gradient shows the bits after the step."""
    results = []
    for updated in (True, False):
        (folder := tmp_path / str(updated)).mkdir()
        with after_a_step(room) as (engine, gate):
            if updated:
                gate.open()
                optimizer_step_of(engine).complete()
            timer = gate.open_later()
            results.append(READS[name](engine, folder))
            timer.join()
    ps.testing.assert_same_bits(*results, name)


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_a_tensor_taken_before_the_step_shows_the_update(kind):
    with after_a_step("120KiB") as (engine, gate):
        gate.open()
        state = engine.optimizer.state[param(engine, LAST)][kind]
        before = state.clone()
        engine.backward(engine(batch(seed=6)).float().square().mean())
        optimizer_step_of(engine).complete()
        gate.close()
        engine.optimizer.step()
        assert LAST in gate.updating
        gate.open_later().join()
        assert not torch.equal(state, before)


def test_a_step_uses_up_the_gradients_at_once():
    with after_a_step("120KiB") as (engine, gate):
        assert gate.updating
        assert all(value.grad is None for value in engine.module.parameters())
        assert engine.gradient(LAST) is None
        assert float(engine.clip_grad_norm_(1.0)) == 0.0
        assert gate.updating


def test_a_failed_update_names_its_parameters_by_their_next_use():
    with after_a_step("120KiB") as (engine, gate):
        updates = optimizer_step_of(engine).updates
        streamed, run, failing = updates.host.streamed, gate._run, updates.queue.updates[1].running

        def fail(update) -> None:
            if update is failing:
                raise ValueError("no more numbers")
            run(update)

        gate._run = fail
        gate.open()
        with pytest.raises(ValueError, match="no more numbers") as raised:
            engine.module[1](engine.module[0](batch().bfloat16()))
        assert "1.0.weight" in raised.value.__notes__[0] and "Load a checkpoint" in raised.value.__notes__[0]
        streamed._run = run
        run_step(engine, (batch(),))
        assert all(value.isfinite().all() for value in engine.module.state_dict().values())


def test_matrices_are_multiplied_while_the_device_has_room(monkeypatch):
    """In the step there is room for one update at a time."""
    start, run, started = HostUpdates.start, StreamedUpdates._run, []

    def start_next(host, spans, *args):
        assert all(running.done for running in started)
        running = start(host, spans, *args)
        if any(span.rule.needs_shape for span in spans):
            started.append(running)
        return running

    monkeypatch.setattr(HostUpdates, "start", start_next)
    monkeypatch.setattr(StreamedUpdates, "_run", lambda *args: (time.sleep(0.02), run(*args)))
    strict_device.configure(seed=1)
    budgets = dict(device_memory="200KiB", host_memory="8MiB", chunk_size="9KiB")
    config = ps.Config(device="strict", optimizer=ps.Muon(), **budgets)
    with engine_of(lambda: toys.layers(WIDTH, LAYERS, nn.GELU), config) as engine:
        for _ in range(3):
            run_step(engine, (batch(),))
            assert started and all(running.done for running in started)


@pytest.mark.parametrize("keep", [True, False])
def test_an_engine_closes_with_updates_in_progress(keep):
    with after_a_step("120KiB") as (engine, gate):
        timer = gate.open_later()
        engine.close(keep=keep)
        timer.join()
        assert all(value.isnan().all() != keep for value in engine.module.parameters())


def test_a_failed_backward_leaves_its_updates_running():
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("no gradient")

    results = []
    for fails in (False, True):
        with after_a_step("120KiB", update=True) as (engine, gate):
            gate.open()
            optimizer_step_of(engine).complete()
            gate.close()
            inputs = batch().requires_grad_()
            if fails:
                inputs.register_hook(fail)
            with pytest.raises(ValueError, match="no gradient") if fails else nullcontext():
                engine.backward(engine(inputs).float().square().mean(), update=True)
            assert gate.updating
            gate.open()
            results.append(param(engine, LAST).clone().cpu())
    assert torch.equal(*results)
