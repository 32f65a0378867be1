"""Logs of lock-free updates: what a replay finds after resumptions, kills and with other options."""

import pytest

from patrickstar._step.update_log import LoggedRun, UpdateLog, UpdateRecord
from patrickstar.errors import ConfigError, TrainingError

OPTIONS = {"after": 2, "gradient_dtype": "fp32"}
PAGES = {"0": {"page_numel": 8, "params": [["weight", 0, 8]]}}


def record(step: int) -> UpdateRecord:
    return UpdateRecord(0, 0, step, step)


def test_steps_after_the_checkpoint_of_a_resumption_are_void(tmp_path):
    log = UpdateLog(tmp_path / "log", OPTIONS)
    for step in (3, 4, 5):
        log.write(step, [record(step)], PAGES)
    log.write(5, [record(9)], PAGES, flush=True)
    log.resume()
    log.write(5, [record(50)], PAGES)
    log.close(PAGES)
    run = LoggedRun(tmp_path / "log")
    assert (run.options, run.pages, run.last_step) == (OPTIONS, PAGES, 5)
    assert [run.at(step) for step in (2, 3, 4, 5)] == [[], [record(3)], [record(4)], [record(50)]]
    with pytest.raises(TrainingError, match="ends with step 5, so that step 6 can't be replayed"):
        run.at(6)
    run.check(4, OPTIONS, PAGES)
    with pytest.raises(ConfigError, match="of a run with after=2, not 3"):
        run.check(4, OPTIONS | {"after": 3}, PAGES)
    with pytest.raises(ConfigError, match="of another model or of other chunks"):
        run.check_any(OPTIONS, {})


def test_a_line_that_a_kill_has_cut_is_not_read_and_overwritten(tmp_path):
    path = tmp_path / "log"
    log = UpdateLog(path, OPTIONS)
    with pytest.raises(ConfigError, match="is written by another engine"):
        UpdateLog(path, OPTIONS)
    log.write(1, [record(1)], PAGES)
    log.close(PAGES)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":2,"upd')
    assert LoggedRun(path).last_step == 1
    UpdateLog(path, OPTIONS).close(PAGES)
    assert path.read_bytes() == whole
