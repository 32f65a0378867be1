"""Law: whatever happens around a step, lock-free updates lose no gradient and use none twice."""

import random
from contextlib import suppress
from functools import partial

import pytest
import speculation_cases as cases
import torch
from lock_free_cases import IN_MEMORY, config_of, engine_with, on_disk, reference_with, replaying
from probes import manager_of, optimizer_step_of
from seeded import engine_of
from speculation_cases import backward, partly_frozen, step
from torch import nn
from toys import module

import patrickstar as ps
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.gradient_buffer import GradientBuffer
from patrickstar._step.lock_free_update import LockFreeUpdates
from patrickstar.errors import ConfigError, TrainingError

STEPS = 8
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def no_progress(monkeypatch):
    """Update pages only when a step has to wait for them."""
    monkeypatch.setattr(DiskOptimizerStep, "progress", lambda self: None)


def steps(trainer, numbers=range(STEPS)):
    """Run steps, and return their losses."""
    return [step(trainer, number) for number in numbers]


def logged(tmp_path, *, max_staleness=4, **options):
    """Return a configuration with states on disk and a log of updates."""
    update = ps.LockFree(after=1, max_staleness=max_staleness, log=tmp_path / "log")
    return config_of(update, **on_disk(tmp_path) | options)


def replayed(config, **options):
    """Return an engine that replays the log of a run; by default in memory."""
    return engine_with(replaying(config, config.update.log, **options or dict(host_memory=4 << 20, disk=None)))


def test_a_checkpoint_of_an_earlier_step_goes_on_as_in_a_new_engine(no_progress, tmp_path):
    """Rates, staleness and steps of the log are those of the steps that are repeated."""
    config = logged(tmp_path, max_staleness=2)
    with engine_with(config) as engine:
        steps(engine, range(3))
        engine.save(tmp_path / "saved")
        steps(engine, range(3, 9))
        engine.load(tmp_path / "saved")
        engine.optimizer.param_groups[0]["lr"] = 0.5
        losses, staleness = [], []
        for number in range(3, 9):
            losses.append(step(engine, number))
            staleness.append(engine.stats.last.peak_staleness)
        state = engine.state_dict()
    assert max(staleness) == 2
    with replayed(config) as again:
        again.load(tmp_path / "saved")
        again.optimizer.param_groups[0]["lr"] = 0.5
        ps.testing.assert_same_bits(losses, steps(again, range(3, 9)), "losses")
        ps.testing.assert_same_bits(state, again.state_dict(), "parameters")


half_used = module(lambda m, x: m.used(x), unused=lambda: nn.Linear(8, 8), used=cases.build)


@pytest.mark.parametrize("update", [ps.LockFree(after=1), ps.Delayed(after=1)], ids=["lock-free", "delayed"])
def test_a_write_into_a_parameter_beside_queued_updates_is_not_lost(update, monkeypatch, tmp_path):
    monkeypatch.setattr(DiskOptimizerStep, "progress", lambda self: self.read_ahead.start(self.updates))
    options = on_disk(tmp_path) | dict(host_memory=270 * 1024, chunk_size="40KiB")
    with engine_of(half_used, config_of(update, **options), page_bytes=8192) as engine:
        assert engine.inspect().disk is not None
        for number in range(4):
            step(engine, number)
            with torch.no_grad():
                engine.module.unused.weight.fill_(number)
        state = engine.state_dict()
        assert (state["unused.weight"] == 3).all()


def test_the_queue_goes_round(tmp_path, monkeypatch):
    """With a disk that delivers the same number of pages per step, no chunk is updated less often than others."""
    budget = 0

    def few(self):
        nonlocal budget
        self.read_ahead.start(self.updates)
        while budget and (queued := self._queued()):
            self.staging_pool.complete(queued[0])
            self._update(queued[0])
            self.read_ahead.start(self.updates)
            budget -= 1

    monkeypatch.setattr(DiskOptimizerStep, "progress", few)
    with engine_with(logged(tmp_path, max_staleness=40, chunk_size="6KiB")) as engine:
        for number in range(40):
            budget = 3
            step(engine, number)
        buffer = optimizer_step_of(engine).lock_free.buffer
        on_disk_now = [index for index in buffer.data.by_chunk if not buffer.data.state_chunks(index)[0].in_memory]
        counts = [max(page.updates.values()) for index in on_disk_now for page in buffer.pages(index)]
        assert len(counts) > 6 and 0 < max(counts) <= 2 * min(counts)


def test_states_are_read_in_the_replay_as_in_the_run(no_progress, tmp_path):
    """A state that is read in the replay only makes it another course."""
    config = logged(tmp_path)
    states = []
    with engine_with(config) as engine:
        for number in range(STEPS):
            step(engine, number)
            states += [engine.state_dict()] if number % 3 == 1 else []
    with replayed(config, disk=config.disk) as engine:
        for number in range(STEPS):
            step(engine, number)
            if number % 3 == 1:
                ps.testing.assert_same_bits(states.pop(0), engine.state_dict(), f"state after {number}")
    with replayed(config, disk=config.disk) as engine, pytest.raises(TrainingError, match="reads of states"):
        for number in range(STEPS):
            step(engine, number)
            engine.state_dict()


@pytest.mark.parametrize("line", [1, slow(4), 7, slow(10), 13])
@pytest.mark.parametrize("then", ["repeat", "read and repeat", "drop"])
def test_a_step_that_is_interrupted(line, then, no_progress, monkeypatch, tmp_path):
    """Ctrl-C between chunks: the step is repeated, after a read of the state, or its gradients are dropped."""
    config = logged(tmp_path, max_staleness=2, chunk_size="6KiB")
    accept, count = LockFreeUpdates.accept, 0

    def interrupted(self, *args):
        nonlocal count
        count += 1
        if count == line:
            raise KeyboardInterrupt
        accept(self, *args)

    def train(engine):
        nonlocal count
        results = []
        for number in range(STEPS):
            if number == 4:
                count = 0
                monkeypatch.setattr(LockFreeUpdates, "accept", interrupted)
            results.append(backward(engine, number))
            try:
                engine.optimizer.step()
            except KeyboardInterrupt:
                if then == "read and repeat":
                    engine.state_dict()
                if then == "drop":
                    engine.optimizer.zero_grad()
                else:
                    engine.optimizer.step()
            monkeypatch.setattr(LockFreeUpdates, "accept", accept)
            engine.optimizer.zero_grad()
            assert engine.stats.last.peak_staleness <= 2
        return [*results, *engine.state_dict().values()]

    with engine_with(config) as engine:
        found = train(engine)
    if then != "drop":
        with replayed(config) as engine:
            ps.testing.assert_same_bits(found, train(engine), "replay")


def interrupt(monkeypatch, name, when):
    """Interrupt a method of `LockFreeUpdates` when `when()` is true."""
    method = getattr(LockFreeUpdates, name)

    def interrupted(self):
        if when():
            raise KeyboardInterrupt
        method(self)

    monkeypatch.setattr(LockFreeUpdates, name, interrupted)


def test_a_step_that_is_interrupted_at_its_end_and_not_repeated(no_progress, monkeypatch, tmp_path):
    config = config_of(ps.LockFree(after=1, max_staleness=1), **on_disk(tmp_path))
    found = []
    interrupt(monkeypatch, "_queue", lambda: len(found) == 3)
    with engine_with(config) as engine:
        for number in range(STEPS):
            backward(engine, number)
            with suppress(KeyboardInterrupt):
                engine.optimizer.step()
            found.append(optimizer_step_of(engine).lock_free.staleness[1])
            engine.optimizer.zero_grad()
    assert max(found) == 1 and found[-1] == 1


def test_a_loop_that_goes_on_after_an_interrupted_step_makes_a_new_one(no_progress, monkeypatch, tmp_path):
    config = config_of(ps.LockFree(after=1, max_staleness=2), **on_disk(tmp_path))
    found = []
    interrupt(monkeypatch, "end_step", lambda: len(found) == 3)
    with engine_with(config) as engine:
        for number in range(STEPS):
            backward(engine, number)
            with suppress(KeyboardInterrupt):
                engine.optimizer.step()
            buffer = optimizer_step_of(engine).lock_free.buffer
            pages = [page for index in buffer.data.by_chunk for page in buffer.pages(index)]
            found.append(max(len(page.pending) and max(page.pending.values()) for page in pages))
        assert optimizer_step_of(engine).steps == STEPS
    assert max(found) == 2


def test_a_step_after_a_load_is_that_after_the_checkpoint(monkeypatch, tmp_path):
    config = config_of(ps.LockFree(after=1), **IN_MEMORY)
    with engine_with(config) as engine:
        steps(engine, range(2))
        engine.save(tmp_path / "saved")
        backward(engine, 2)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch, "end_step", lambda: True)
            engine.optimizer.step()
        engine.load(tmp_path / "saved")
        step(engine, 2)
        assert optimizer_step_of(engine).steps == 3


@pytest.mark.parametrize("options", [IN_MEMORY, None], ids=["in memory", "on disk"])
def test_a_write_into_a_frozen_parameter(options, tmp_path):
    config = config_of(ps.LockFree(after=1), **on_disk(tmp_path) if options is None else options)
    with engine_of(partly_frozen, config, page_bytes=8192) as engine:
        step(engine, 0)
        first = next(engine.module.parameters())
        with torch.no_grad():
            first.fill_(0.5)
        step(engine, 1)
        assert (first == 0.5).all()


@pytest.mark.parametrize("then", ["flush", "save"])
def test_a_load_and_a_flush_leave_the_log_right(then, no_progress, tmp_path):
    config = logged(tmp_path)

    def go_on(engine):
        engine.load(tmp_path / "saved")
        engine.optimizer.flush() if then == "flush" else engine.save(tmp_path / f"again {id(engine)}")
        return [*steps(engine, range(3, STEPS)), *engine.state_dict().values()]

    with engine_with(config) as engine:
        for number in range(6):
            step(engine, number)
            if number == 2:
                engine.save(tmp_path / "saved")
        found = go_on(engine)
    with replayed(config) as engine:
        ps.testing.assert_same_bits(found, go_on(engine), "replay")


@pytest.mark.parametrize("after_step", range(1, STEPS - 2))
def test_a_flush_in_the_replay_only_is_another_course(after_step, no_progress, tmp_path):
    config = logged(tmp_path, max_staleness=2)
    with engine_with(config) as engine:
        steps(engine)
    with replayed(config) as engine, pytest.raises(TrainingError, match="differs from the log"):
        steps(engine, range(after_step + 1))
        engine.optimizer.flush()
        steps(engine, range(after_step + 1, STEPS))


def test_sums_follow_memory_that_reading_a_gradient_moves(monkeypatch, tmp_path):
    """Fetching a gradient may close gaps of the host's memory."""
    gradient_of = GradientBuffer._gradient

    def compacting(self, managed):
        for found in gradient_of(self, managed):
            manager_of(engine).host_tier._close_gaps()
            yield found

    config = logged(tmp_path)
    with engine_with(config) as engine:
        block = manager_of(engine).host_tier.allocate_block(4096)
        first = steps(engine, range(2))
        manager_of(engine).host_tier.release_block(block)
        monkeypatch.setattr(GradientBuffer, "_gradient", compacting)
        found = [*first, *steps(engine, range(2, STEPS)), *engine.state_dict().values()]
    monkeypatch.undo()
    reference = reference_with(config, config.update.log)
    ps.testing.assert_same_bits([*steps(reference), *reference.state_dict().values()], found, "reference")


def test_parameters_that_are_unfrozen_are_in_the_log(no_progress, tmp_path):
    config = logged(tmp_path, host_memory=330 * 1024)

    def train(trainer):
        losses = steps(trainer, range(4))
        next(trainer.module.parameters()).requires_grad_(True)
        if not isinstance(trainer, ps.Engine):
            trainer.optimizer.flush()
        return [*losses, *steps(trainer, range(4, STEPS)), *trainer.state_dict().values()]

    with engine_of(partly_frozen, config, page_bytes=8192) as engine:
        found = train(engine)
    reference = reference_with(config, config.update.log, partly_frozen)
    ps.testing.assert_same_bits(train(reference), found, "reference")


def test_options_and_budgets_that_are_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="log and replay are the same file"):
        ps.LockFree(log="a/../updates", replay="updates")
    with pytest.raises(ConfigError, match=r"^Config: gradient_dtype='16-bit' stores gradients without the loss scale"):
        config_of(ps.LockFree(gradient_dtype="16-bit"), precision="fp16", **IN_MEMORY)
    with pytest.raises(ps.errors.BudgetError, match=r"late updates need \d+ bytes .* on the host"):
        engine_with(config_of(ps.LockFree(), disk=ps.Disk(tmp_path), host_memory="100KiB"))


def test_the_buffers_are_counted_and_stay_on_the_host(tmp_path):
    options = on_disk(tmp_path)
    with (
        engine_with(config_of(ps.LockFree(after=1), **options)) as late,
        engine_with(config_of(None, **options)) as exact,
    ):
        more = late.layout.model_data_bytes - exact.layout.model_data_bytes
        param16 = sum(chunk.nbytes for chunk in manager_of(exact).param16.values())
        assert more == 2 * param16  # newest values and sums in fp32, less the upper halves of masters
        choice = random.Random(0)
        for number in range(4):
            step(late, number)
            manager_of(late).free_host(choice.choice([10_000, 200_000]))
            for (kind, _), chunk in manager_of(late).chunks.items():
                assert not kind.startswith("buffered") or (chunk.host.valid and not chunk.device_bytes)
            assert late.stats.last.host_peak_model_bytes <= late.host_budget_bytes
