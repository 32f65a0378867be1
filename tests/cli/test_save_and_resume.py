"""`patrickstar train --save-every … --resume …` and `patrickstar export`; limits of time, notices, precisions."""

import json
import shutil
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import rates
import torch
from command_line import CONFIG, SMALL, assert_refused, assert_told, call, change_to, done, read_log
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import patrickstar as ps
from patrickstar._checkpoint.metadata import precision_of
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli import early_checks
from patrickstar._cli import train as train_command
from patrickstar._cli.first_step_notice import NOTICE_S, FirstStepNotice

ABOUT = {"step": 3, "lr": 0.01, "weight_decay": 0.01, "architecture": "A", "config": "{}"}
ABOUT |= {"tokenizer": "{}", "trained": True}

pytestmark = pytest.mark.usefixtures("one_thread", "small_text")

FIELDS = ("step", "loss", "learning_rate", "gradient_norm")


@pytest.fixture(autouse=True)
def _with_dropout(small_text: None) -> None:
    """Let the generators' states show."""
    Path("model.json").write_text(json.dumps(CONFIG | {"resid_pdrop": 0.1}))


train, trained = partial(call, "train", *SMALL, "--steps", 7), partial(done, "train", *SMALL, "--steps", 7)


def steps(log: str = "log.jsonl") -> list[dict[str, object]]:
    return [{key: record[key] for key in FIELDS} for record in read_log("step", log=log)]


@pytest.fixture(scope="module")
def run_of_seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that is complete, with its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        change_to(folder, patch, resid_pdrop=0.1)
        trained("--save-every", 7, "--save-to", "kept")
    return folder


@pytest.fixture
def saved_run(run_of_seven: Path, small_text: None) -> None:
    """Copy its checkpoint to the current directory."""
    shutil.copytree(run_of_seven / "kept", "kept")


@pytest.mark.parametrize("delay", [(), ("--delay-from", 3)])
def test_a_run_that_is_resumed_is_the_one_that_was_not_stopped(delay: tuple[object, ...]) -> None:
    trained("--log", "whole.jsonl", *delay)
    trained("--log", "cut.jsonl", "--save-every", 2, "--keep", 9, "--save-to", "kept", *delay)
    assert sorted(path.name for path in Path("kept").iterdir()) == ["step-2", "step-4", "step-6", "step-7"]
    for late in ("step-6", "step-7"):
        shutil.rmtree(Path("kept", late))
    # The run was killed in step 6, while it wrote to its log.
    lines = Path("cut.jsonl").read_text().splitlines(keepends=True)
    sixth = next(number for number, line in enumerate(lines) if line.startswith('{"kind": "step", "step": 6,'))
    Path("cut.jsonl").write_text("".join(lines[:sixth]) + lines[sixth][:20])
    resumed = trained("--log", "cut.jsonl", "--save-every", 2, "--keep", 2, "--resume", "kept", *delay)
    assert "resumed from kept/step-4" in resumed.output
    assert steps("cut.jsonl") == steps("whole.jsonl")
    kinds = [json.loads(line)["kind"] for line in Path("cut.jsonl").read_text().splitlines()]
    assert (kinds.count("run"), kinds.count("summary")) == (1, 1)
    assert sorted(path.name for path in Path("kept").iterdir()) == ["step-6", "step-7"]


def test_resuming_from_one_checkpoint_among_others() -> None:
    trained("--log", "one.jsonl", "--save-every", 3, "--save-to", "kept")
    trained("--log", "two.jsonl", "--resume", "kept/step-3", "--device-memory", "32MiB", "--chunk-size", "2000B")
    assert steps("two.jsonl") == steps("one.jsonl")[3:]
    assert len(list(Path("kept").iterdir())) == 3, "nothing is saved where nothing is asked for"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "nowhere"], "no such folder"),
        (["--resume", "empty"], "there is no checkpoint in it"),
        (["--resume", "kept"], "nothing is left to do"),
        (["--resume", "kept", "--steps", 9, "--seed", 5], "'seed': 5"),
        (["--resume", "kept", "--steps", 9, "--sequence", 8], "'sequence': 8"),
        (["--resume", "kept", "--steps", 9, "--model", "gpt-1m"], "does not fit the model"),
        (["--save-every", 2, "--save-to", "kept"], "has checkpoints of an earlier run (step-7)"),
        (["--save-to", "other"], "--save-every"),
        (["--resume", "kept/step-7/rank-00000.safetensors"], "it is a file, not a folder"),
        (["--resume", "kept", "--steps", 9, "--lr", "0.9"], "--lr 0.01"),
    ],
)
def test_what_can_not_be_resumed_or_saved(words: list[object], message: str, saved_run: None) -> None:
    Path("empty").mkdir()
    refused = train(*words)
    assert_refused(refused, message)
    assert refused.output.count("error: ") == 1


def test_exporting(saved_run: None) -> None:
    assert "in fp32, from kept/step-7" in done("export", "kept", "full").output
    done("export", "kept/step-7", "half", "--dtype", "bf16", "--max-shard", "20KB")
    assert len(list(Path("half").glob("*.safetensors"))) > 1
    full, half = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("full", "half"))
    tokenizer = AutoTokenizer.from_pretrained("full")
    ids = tokenizer("def f1(x):", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "def f1(x):"
    reader = CheckpointReader("kept/step-7")
    stored = load_file("full/model.safetensors")
    assert full.dtype is torch.float32 and half.dtype is torch.bfloat16
    assert "lm_head.weight" not in stored, "tied weights are saved once"
    for name, value in full.state_dict().items():
        if name in stored:
            assert torch.equal(value, reader.tensor(f"model.{name}")), name
            assert torch.equal(half.state_dict()[name], value.to(torch.bfloat16)), name
    # What was exported can be trained on, with its tokenizer.
    done("train", "--model", "half", "--data", "text.py", "--steps", 1, "--sequence", 8, "--device", "cpu")
    for words, message in (
        (["kept", "full"], "full already exists"),
        (["full", "new"], "it is a model folder"),
        (["nowhere", "new"], "no such folder"),
        (["kept", "new", "--max-shard", "much"], "'much'"),
    ):
        assert_refused(call("export", *words), message)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (None, "run: "),
        ({"step": 3}, "run.lr: "),
        (ABOUT | {"step": "3"}, "run.step: "),
        (ABOUT | {"config": "[1]"}, "run.config: "),
        (ABOUT | {"config": "[" * 100_000}, "run.config: "),
        (ABOUT | {"config": "{"}, "run.config: "),
        (ABOUT | {"lr": None}, "run.lr: "),
        (ABOUT | {"more": 1}, "run.more: "),
    ],
)
def test_the_checkpoint_of_another_program(said: dict[str, object] | None, wrong: str) -> None:
    engine, _ = ps.initialize(lambda: nn.Linear(2, 2), ps.Config(device="cpu", precision="fp32"))
    ps.Checkpoints("kept").save(engine, 3, {} if said is None else {"run": said})
    engine.close()
    for refused in (train("--resume", "kept"), call("export", "kept", "new")):
        assert_refused(refused, "was not written by patrickstar train", wrong)
    assert not Path("new").exists()


def test_a_last_checkpoint_that_can_not_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps.Checkpoints, "save", lambda *_, wait, **__: not wait)
    done = train("--save-every", 3, "--save-to", "kept")
    assert_refused(done, "the checkpoint after step 7, the last one, was not written")
    assert "tokens/s" in done.stdout


# Limits of time, precisions and notices

AT_ONCE = ("--minutes", "1e-6")
"""A limit that has passed when the first step ends."""


def summary(log: str) -> dict[str, object]:
    return read_log("summary", log=log)[0]


def test_a_run_that_is_out_of_time_ends_with_a_step_and_is_resumed_with_the_same_bits() -> None:
    trained("--log", "whole.jsonl")
    saves = ("--save-every", 5, "--save-to", "kept")
    finished = trained("--log", "cut.jsonl", *saves, *AT_ONCE)
    assert "1, ended by --minutes 1e-06 in " in finished.output
    assert steps("cut.jsonl") == steps("whole.jsonl")[:1]
    assert (summary("cut.jsonl")["steps"], summary("cut.jsonl")["minutes"]) == (1, 1e-6)
    assert [path.name for path in Path("kept").iterdir()] == ["step-1"]  # between two that are due
    trained("--log", "cut.jsonl", *saves, "--resume", "kept", *AT_ONCE)
    assert steps("cut.jsonl") == steps("whole.jsonl")[:2]
    finished = trained("--log", "cut.jsonl", *saves, "--resume", "kept", "--minutes", 60)
    assert steps("cut.jsonl") == steps("whole.jsonl")
    assert summary("cut.jsonl")["minutes"] is None and "ended by" not in finished.output
    # The learning rate follows the steps, so that it does not depend on the time they take.
    assert steps("cut.jsonl")[6]["learning_rate"] == pytest.approx(1e-2 * train_command.learning_rate_factor(6, 10, 7))


def test_a_wrong_limit_is_told() -> None:
    for given in ("0", "-1", "nan", "inf"):
        assert_told(train("--minutes", given), f"--minutes {given} is not a positive number")
    assert "--minutes" in train("--minutes", "soon").output


def test_a_run_says_which_precision_it_chose_and_a_resumed_one_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58e9))
    finished = train("--log", "whole.jsonl")
    assert finished.output.count("precision: fp32, since a core computes") == 1
    assert "0.70 GFLOPS in bf16 and at 58 GFLOPS in fp32" in finished.output
    assert summary("whole.jsonl")["precision"] == "fp32"
    trained("--log", "cut.jsonl", "--save-every", 3, *AT_ONCE)
    assert precision_of(Path("runs/checkpoints/step-1")) == "fp32"
    monkeypatch.setattr(rates.MEASURED, rates.never)
    finished = trained("--log", "cut.jsonl", "--save-every", 3, "--resume", "runs/checkpoints")
    assert steps("cut.jsonl") == steps("whole.jsonl")
    assert "precision: fp32, since runs/checkpoints/step-1 was trained in it" in finished.output
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
    progress = Mock(wraps=train_command.Progress)
    monkeypatch.setattr(train_command, "Progress", progress)
    finished = train(*asked, *AT_ONCE)
    text = progress.call_args.kwargs["notice"]
    assert finished.exit_code == 0 and text not in finished.output
    assert f"has taken {NOTICE_S:.0f} s" in text and "32 tokens through" in text and "in bf16 on cpu" in text
    assert "--batch" in text and ("--precision auto" in text) is tries
