"""Law: beside delayed updates a failing disk, a dead thread or a killed run lose nothing without saying so."""

from pathlib import Path

import pytest
import torch
from probes import fail_reads
from speculation_cases import backward, build
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine
from patrickstar.errors import DiskError, MoveError

from .test_disk_faults import (
    CHUNK,
    FAULTS,
    check_message,
    check_nothing_is_left,
    check_parameters,
    kill_one,
    kill_readers,
    kill_writers,
    reference_run,
    run,
)
from .tiers import Room, blocks, inputs, last_save_of_a_killed_run, on_disk, open_files, options, small_engine

DELAYED = ps.Delayed(after=1)


@pytest.fixture(scope="module")
def reference():
    return reference_run(options(update=DELAYED))


@pytest.fixture
def engine(tmp_path):
    config = on_disk(blocks, options(update=DELAYED), tmp_path, inputs(1)[0], Room(host_bytes=20000))
    torch.manual_seed(0)
    made = small_engine(blocks, config)
    yield made
    made.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("when", [1, 2])
def test_a_disk_that_fails(engine, tmp_path, reference, fault, when):
    (losses, states), seen = reference, []
    before = open_files() - 1  # the swap file
    kind, operation, reason = FAULTS[fault]
    with pytest.raises(kind) as raised:
        run(engine, seen, lambda number: number == when and fault(engine))
    check_message(raised.value, engine, operation, reason)
    assert when <= len(seen) and seen == losses[: len(seen)]
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, states[when - 1 : len(seen) + 1])


@pytest.mark.parametrize("index", range(6))
def test_newer_parameters_that_a_step_cannot_read(engine, tmp_path, reference, index):
    before = open_files() - 1
    for number, batch in enumerate(inputs(2)):
        engine.backward(mean_square(engine(*batch)))
        if number == 0:
            engine.optimizer.step()
    fail_reads(engine, f"delayed16[{index}]", DiskError("no such sector"))
    with pytest.raises(DiskError, match="no such sector") as raised:
        engine.optimizer.step()
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, reference[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", [kill_readers, kill_writers, kill_one], ids=lambda fault: fault.__name__)
def test_threads_that_die(engine, tmp_path, reference, fault):
    (losses, states), seen = reference, []
    before = open_files() - 1
    with pytest.raises(MoveError, match=rf"{CHUNK}.*a worker thread (died|was told to end)") as raised:
        run(engine, seen, lambda number: number == 1 and fault(engine))
        run(engine, [])
    assert seen == losses[: len(seen)]
    check_nothing_is_left(engine, tmp_path, before)
    check_parameters(engine, raised.value, states)


def trained(folder: Path, first: int, last: int, saves: bool = False) -> Engine:
    """Train from step `first` to `last`, from a checkpoint of the step before if there is one; print each step."""
    torch.manual_seed(0)
    config = ps.Config(
        device="cpu",
        chunk_size="18KiB",
        device_memory="72KiB",
        host_memory="200KiB",
        disk=ps.Disk(folder),
        update=ps.Delayed(after=2),
    )
    engine = Engine(build, config, meter=testing.NoMeter(), page_bytes=8192)
    if (folder / f"step {first - 1}").exists():
        engine.load(folder / f"step {first - 1}")
    for step in range(first, last + 1):
        backward(engine, step)
        if saves:
            print(step, flush=True)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if saves:
            engine.save(folder / f"step {step}", wait=step % 2 == 0)
    return engine


def test_a_killed_run_resumes_with_the_same_bits(tmp_path):
    saved = last_save_of_a_killed_run("test_delayed_faults", tmp_path, lambda line: int(line) == 7)
    assert saved >= 4
    (undisturbed := tmp_path / "undisturbed").mkdir()
    with trained(undisturbed, 1, saved + 2) as expected, trained(tmp_path, saved + 1, saved + 2) as found:
        testing.assert_same_bits(expected.state_dict(), found.state_dict(), "resumed")
        testing._assert_same_states(expected.optimizer.state_dict(), found.optimizer.state_dict())
