"""Promises to a newcomer: runs that end in time, what they say meanwhile, and the precision that is chosen."""

import threading
from pathlib import Path

import pytest
import rates
from command_line import assert_told, read_log
from test_save_and_resume import _with_dropout, steps, train, trained  # noqa: F401

from patrickstar._checkpoint.metadata import precision_of
from patrickstar._cli import early_checks
from patrickstar._cli import train as train_command
from patrickstar._cli.first_step_notice import NOTICE_S, FirstStepNotice
from patrickstar._cli.train import learning_rate_factor

pytestmark = pytest.mark.usefixtures("one_thread", "small_text")

AT_ONCE = ("--minutes", "1e-6")
"""A limit that has passed when the first step ends."""


def summary(log: str) -> dict[str, object]:
    return read_log("summary", log=log)[0]


def test_a_run_that_is_out_of_time_ends_with_a_step_and_is_resumed_with_the_same_bits() -> None:
    trained("--log", "whole.jsonl")
    saves = ("--save-every", 5, "--save-to", "kept")
    done = trained("--log", "cut.jsonl", *saves, *AT_ONCE)
    assert "1, ended by --minutes 1e-06 in " in done.output
    assert steps("cut.jsonl") == steps("whole.jsonl")[:1]
    assert (summary("cut.jsonl")["steps"], summary("cut.jsonl")["minutes"]) == (1, 1e-6)
    assert [path.name for path in Path("kept").iterdir()] == ["step-1"]  # between two that are due
    trained("--log", "cut.jsonl", *saves, "--resume", "kept", *AT_ONCE)
    assert steps("cut.jsonl") == steps("whole.jsonl")[:2]
    done = trained("--log", "cut.jsonl", *saves, "--resume", "kept", "--minutes", 60)
    assert steps("cut.jsonl") == steps("whole.jsonl")
    assert summary("cut.jsonl")["minutes"] is None and "ended by" not in done.output
    # The learning rate follows the steps, so that it does not depend on the time they take.
    assert steps("cut.jsonl")[6]["learning_rate"] == pytest.approx(1e-2 * learning_rate_factor(6, 10, 7))


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
def test_a_wrong_limit_is_told_in_one_line(given: str) -> None:
    assert_told(train("--minutes", given), f"--minutes {given} is not a positive number")


def test_a_limit_without_a_number_is_a_usage_error() -> None:
    assert "--minutes" in train("--minutes", "soon").output


def test_a_run_says_which_precision_it_chose_and_a_resumed_one_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58e9))
    done = train("--log", "whole.jsonl")
    assert done.output.count("precision: fp32, since a core computes") == 1
    assert "0.70 GFLOPS in bf16 and at 58 GFLOPS in fp32" in done.output
    assert summary("whole.jsonl")["precision"] == "fp32"
    trained("--log", "cut.jsonl", "--save-every", 3, *AT_ONCE)
    assert precision_of(Path("runs/checkpoints/step-1")) == "fp32"

    def never(*_: object) -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(rates.MEASURED, never)
    done = trained("--log", "cut.jsonl", "--save-every", 3, "--resume", "runs/checkpoints")
    assert steps("cut.jsonl") == steps("whole.jsonl")
    assert "precision: fp32, since runs/checkpoints/step-1 was trained in it" in done.output
    assert summary("cut.jsonl")["precision"] == "fp32"


def test_a_dry_run_says_which_precision_it_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates.MEASURED, rates.fixed(fp32=2e9))
    assert "precision: fp32, since a core computes" in train("--dry-run").output
    named = trained("--dry-run", "--machine", "8xV100-32GB")
    assert "precision: fp16, since the spec of 8xV100-32GB" in named.output


def test_a_preset_is_refused_early_only_if_no_precision_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 1 << 30}))
    budgets = ("--model", "gpt-12b", "--device-memory", "1GiB", "--host-memory", "1GiB")
    assert "the layers of gpt-12b have" in train(*budgets).output


def test_a_first_step_that_takes_long_is_explained_once() -> None:
    said = threading.Event()
    notice = FirstStepNotice(said.set, after_s=0.0)
    notice.start()
    assert said.wait(10)
    notice.end()
    said.clear()
    notice = FirstStepNotice(said.set, after_s=3600.0)
    notice.start()
    notice.end()
    assert not notice._timer.is_alive() or notice._timer.finished.is_set()
    assert not said.is_set()


@pytest.mark.parametrize(("asked", "tries"), [((), False), (("--precision", "bf16"), True)])
def test_the_explanation_says_what_runs_and_what_to_try(monkeypatch, asked: tuple[str, ...], tries: bool) -> None:
    texts: list[str] = []
    progress = train_command.Progress

    def noted(*arguments: object, notice: str, **options: object) -> object:
        texts.append(notice)
        return progress(*arguments, notice=notice, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(train_command, "Progress", noted)
    done = train(*asked, *AT_ONCE)
    assert done.exit_code == 0 and texts[0] not in done.output
    text = texts[0]
    assert f"has taken {NOTICE_S:.0f} s" in text and "32 tokens through" in text and "in bf16 on cpu" in text
    assert "--batch" in text and ("--precision auto" in text) is tries
