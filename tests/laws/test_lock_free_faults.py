"""Law: beside lock-free updates a failing disk, a dead thread or a killed run lose nothing without saying so."""

import json
import os
import warnings
from pathlib import Path

import pytest
import speculation_cases as cases
import torch
from lock_free_cases import HOST_BYTES, config_of, engine_with, replaying
from probes import fail_at, optimizer_step_of
from seeded import assert_same_model, reference_of
from speculation_cases import backward
from toys import train

import patrickstar as ps
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar.errors import ConfigError, DiskError, MoveError, TrainingError

from .test_disk_faults import CHUNK, FAULTS, KILLS, check_message, check_nothing_is_left, run
from .tiers import Room, blocks, inputs, last_save_of_a_killed_run, on_disk, open_files, options, small_engine

UPDATE = ps.LockFree(after=1, max_staleness=2)


@pytest.fixture
def folders(tmp_path):
    """Folders of the swap file, which has to be empty at the end, and of the log."""
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap", tmp_path


@pytest.fixture
def engine(folders):
    swap, folder = folders
    config = on_disk(blocks, options(update=UPDATE), swap, inputs(1)[0], Room(host_bytes=20000))
    logged = UPDATE.model_copy(update={"log": folder / "log"})
    made = small_engine(blocks, config.model_copy(update={"update": logged}))
    yield made
    made.close()


def possible_states(log, steps):
    """Return the masters of runs that end in step `steps` + 1: before it, after its older updates, and after all."""
    states = []
    with log.open("a") as file:  # the step that failed has left no line
        file.write(json.dumps({"step": steps + 1, "updates": []}) + "\n")
    for completes in (False, True):
        update = UPDATE.model_copy(update={"replay": log})
        trainer = reference_of(blocks, options(update=update), ps.testing.LockFreeOptimizer)
        batches = inputs(steps + 1)
        train(trainer, batches[:steps])
        if completes:
            trainer.optimizer.complete()
        states.append({name: trainer.master(param).clone() for name, param in trainer.module.named_parameters()})
        train(trainer, batches[steps:])
        states.append(trainer.state_dict())
    return states


def check_whole_updates(engine, error, log):
    """Check that each element has all of an update or nothing of it, unless its parameter is named as lost.

    Elements of a parameter that is named as rounded may be those of a rounded master.
    """
    (note,) = [note for note in error.__notes__ if "The engine is closed." in note]
    states = possible_states(log, engine.stats.total.steps)
    for name, param in engine.module.named_parameters():
        if param.isnan().any():
            assert f"{name}" in note and param.isnan().all(), name
        else:
            rounded = f"{name}" in note.partition("are rounded")[2]
            found = [state[name] for state in states] + [state[name].bfloat16().float() for state in states] * rounded
            assert torch.stack([param.detach() == state for state in found]).any(dim=0).all(), name


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_fails(engine, folders, fault, when):
    swap, folder = folders
    before = open_files() - 2  # the swap file and the log
    act, operation, reason = FAULTS[fault]
    with pytest.raises(DiskError) as raised:
        run(engine, [], lambda number: number == when and act(engine))
    check_message(raised.value, engine, operation, reason)
    check_nothing_is_left(engine, swap, before)
    check_whole_updates(engine, raised.value, folder / "log")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kill", KILLS)
def test_threads_that_die(engine, folders, kill):
    swap, folder = folders
    before = open_files() - 2
    with pytest.raises(MoveError, match=rf"{CHUNK}.*a worker thread (died|was told to end)") as raised:
        run(engine, [], lambda number: number == 1 and KILLS[kill](engine))
        run(engine, [])
    check_nothing_is_left(engine, swap, before)
    if engine.stats.total.steps < 4:
        check_whole_updates(engine, raised.value, folder / "log")


def trained(
    folder: Path, first: int, last: int, saves: bool = False, *, replay: Path | None = None, disk: Path | None = None
) -> ps.Engine:
    """Train from step `first` to `last`, from a checkpoint of the step before if there is one; print each step."""
    update = ps.LockFree(after=2, log=None if replay else folder / "log", replay=replay)
    engine = engine_with(config_of(update, host_memory=HOST_BYTES, disk=ps.Disk(disk or folder)))
    return cases.trained(engine, folder, first, last, 2 * saves)


def test_a_killed_run_goes_on_and_its_log_with_it(tmp_path):
    saved = last_save_of_a_killed_run(trained, tmp_path, lambda step, speculated: step == 9)
    assert saved >= 6
    with trained(tmp_path, saved + 1, saved + 4) as resumed:
        state, optimizer = resumed.state_dict(), resumed.optimizer.state_dict()
    assert (tmp_path / "log").read_text().count('"format"') == 2
    with trained(tmp_path, saved + 1, saved + 4, replay=tmp_path / "log") as found:
        ps.testing.assert_same_bits(state, found.state_dict(), "replayed")
        ps.testing._assert_same_states(optimizer, found.optimizer.state_dict())


def test_a_checkpoint_holds_all_gradients_and_goes_on_in_any_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(DiskOptimizerStep, "progress", lambda self: None)
    with trained(tmp_path, 1, 5) as engine:
        assert engine.stats.last.staleness > 0
        engine.save(tmp_path / "step 5")
        with engine_with(config_of(None, host_memory="4MiB")) as exact:
            exact.load(tmp_path / "step 5")
            assert_same_model(engine, exact)
            ps.testing.assert_same_bits([backward(exact, 9)], [backward(engine, 9)], "loss after a save")


def test_a_replay_of_another_course_is_refused(tmp_path, monkeypatch):
    progress = DiskOptimizerStep.progress
    monkeypatch.setattr(DiskOptimizerStep, "progress", lambda self: None)
    with trained(tmp_path, 1, 8):
        pass
    monkeypatch.setattr(DiskOptimizerStep, "progress", progress)
    config = config_of(ps.LockFree(after=2, replay=tmp_path / "log"), host_memory="4MiB")
    with engine_with(config) as engine:
        cases.trained(engine, tmp_path, 1, 4)
        engine.optimizer.flush()  # the run did not
        with pytest.raises(TrainingError, match=r"differs from the log .* chunk \d+ used gradients of steps \d+ to"):
            cases.trained(engine, tmp_path, 5, 8)


def test_a_log_that_cannot_be_used_is_refused(tmp_path):
    other = json.dumps({"format": 7, "chunks": {}}) + "\n"
    (tmp_path / "thesis.txt").write_text("years of work")
    for name, content, reason in [
        ("missing", None, "can't be read"),
        ("empty", "", "no description of pages"),
        ("text", "hello\n", "line 1 is invalid"),
        ("other", other, "format 7 is unknown"),
    ]:
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=f"{name}.*{reason}"):
            engine_with(config_of(ps.LockFree(replay=tmp_path / name), host_memory="4MiB"))
    for name, reason in (("no folder/log", "can't be written"), ("thesis.txt", "exists and is no log of updates")):
        with pytest.raises(ConfigError, match=reason):
            engine_with(config_of(ps.LockFree(log=tmp_path / name), host_memory="4MiB"))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_forked_process_does_not_hold_the_log(tmp_path):
    config = config_of(ps.LockFree(log=tmp_path / "log"), host_memory="4MiB")
    with engine_with(config):
        read, write = os.pipe()
        if not (child := os.fork()):
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        engine_with(config).close()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_run_that_was_resumed_with_other_chunks_is_replayed_in_part(tmp_path):
    with trained(tmp_path, 1, 4) as engine:
        engine.save(tmp_path / "step 4")
    config = config_of(ps.LockFree(after=2, log=tmp_path / "log"), host_memory="4MiB", chunk_size="6KiB")
    results = []
    for each in (config, replaying(config, tmp_path / "log")):
        with engine_with(each) as engine:
            engine.load(tmp_path / "step 4")
            results.append([cases.step(engine, 5), *engine.state_dict().values()])
    ps.testing.assert_same_bits(*results, "replay")
    with pytest.raises(ConfigError, match=r"of other chunks.*step 5 can't be replayed"):
        trained(tmp_path / "none", 1, 6, replay=tmp_path / "log", disk=tmp_path)


def test_a_warning_that_is_an_error_does_not_keep_the_model(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine = engine_with(config_of(ps.LockFree(after=9, log="/dev/full"), host_memory="4MiB"))
        with pytest.raises(UserWarning, match="can't be written"):
            engine.close()
    assert all(type(param) is torch.nn.Parameter for param in engine.module.parameters())


def test_a_full_disk_under_the_log_is_said_once_and_stops_no_training():
    update = ps.LockFree(after=1, log="/dev/full")
    with engine_with(config_of(update, host_memory="4MiB")) as engine, pytest.warns(UserWarning) as warned:
        cases.trained(engine, Path("none"), 1, 3)
    (message,) = [str(warning.message) for warning in warned]
    assert "log of updates '/dev/full' can't be written" in message and "No space left" in message


def test_a_step_that_was_interrupted_goes_on_where_it_stopped(monkeypatch):
    with (
        engine_with(config_of(ps.LockFree(after=1), host_memory="4MiB")) as engine,
        engine_with(config_of(None, host_memory="4MiB")) as exact,
    ):
        calls = fail_at(monkeypatch, optimizer_step_of(engine).lock_free, "accept", 5, KeyboardInterrupt())
        for number in range(4):
            ps.testing.assert_same_bits([backward(exact, number)], [backward(engine, number)], f"loss {number}")
            exact.optimizer.step()
            try:
                engine.optimizer.step()
            except KeyboardInterrupt:
                engine.optimizer.step()
        assert len(calls) > 5 and optimizer_step_of(engine).steps == 4


def test_the_engine_of_a_folder_is_the_model_of_its_masters(engine):
    """After `close` the parameters contain all gradients."""
    train(engine, inputs(4))
    state = engine.state_dict()
    engine.close()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach(), state[name]), name
