"""`patrickstar train --tensorboard` and `engine.record(tensorboard=...)`: the values of the log of JSON lines."""

import sys
from pathlib import Path

import pytest
import torch
from command_line import assert_refused, train, trained
from event_files import FIELDS, expected_scalars, scalars_in
from torch import nn

import patrickstar as ps
from patrickstar._report.run_file import read_run
from patrickstar.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread", "small_text")

WITHOUT = {tag for tag in FIELDS if tag.partition("/")[0] in ("disk", "collectives", "staleness")}
"""Scalars that only some runs have."""


def one_step(engine: ps.Engine) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def small_engine(**options: object) -> ps.Engine:
    return ps.initialize(nn.Linear(8, 8), ps.Config(device="cpu", **options))[0]


def test_values_are_those_of_the_log_and_a_resumed_run_continues_them() -> None:
    words = ("--tensorboard", "events", "--save-to", "saved")
    trained("--steps", 5, "--save-every", 3, *words)
    found = scalars_in(Path("events"))
    assert found == expected_scalars(read_run(Path("log.jsonl")), FIELDS.keys() - WITHOUT)
    assert all(sorted(values) == [1, 2, 3, 4, 5] for values in found.values())
    trained("--steps", 6, "--save-every", 3, "--resume", "saved/step-3", *words)
    run, again = read_run(Path("log.jsonl")), scalars_in(Path("events"))
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert again == expected_scalars(run, FIELDS.keys() - WITHOUT)
    assert len(list(Path("events").iterdir())) == 2


def test_disk_and_staleness_have_scalars_where_there_are_such() -> None:
    trained("--steps", 4, "--tensorboard", "events", "--disk", ".", "--delay-from", 2)
    found = scalars_in(Path("events"))
    tags = FIELDS.keys() - {tag for tag in FIELDS if tag.startswith("collectives/")}
    assert found == expected_scalars(read_run(Path("log.jsonl")), tags)
    assert found["staleness/mean_updates"][4] > 0


def test_a_loop_with_neither_loss_nor_tokens() -> None:
    """A recording without a log of JSON lines; the second one replaces the steps of the first."""
    for steps in (3, 2):
        with small_engine() as engine, engine.record(tensorboard="events"):
            for _ in range(steps):
                one_step(engine)
    found = scalars_in(Path("events"))
    assert not {"train/loss", "train/learning_rate", "train/gradient_norm", "train/tokens_per_s"} & found.keys()
    assert list(found["time/step_s"]) == [1, 2]


def test_a_run_that_fails_before_its_first_step_leaves_the_events_unchanged() -> None:
    with small_engine() as engine, engine.record(tensorboard="events"):
        one_step(engine)
    before = scalars_in(Path("events"))
    with small_engine() as engine, pytest.raises(RuntimeError), engine.record(tensorboard="events"):
        raise RuntimeError
    assert scalars_in(Path("events")) == before


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        with pytest.raises(ConfigError, match=r"the log text.py for TensorBoard can't be written: File exists"):
            engine.record(tensorboard="text.py")
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            engine.record(tensorboard="events")
    assert_refused(train("--tensorboard", "events"), "error: a log for TensorBoard needs its package")
    assert not Path("events").exists() and not Path("log.jsonl").exists()
