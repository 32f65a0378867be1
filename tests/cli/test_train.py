"""`patrickstar train` from end to end, on models of a few thousand parameters; what it writes for TensorBoard."""

import io
import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import SMALL, assert_refused, assert_told, call, read_log, train, trained
from distributed import ranks
from distributed.test_cli import main
from event_files import FIELDS, expected_scalars, scalars_in
from rich.console import Console
from safetensors.torch import save_file
from seeded import run_step
from torch import nn

import patrickstar as ps
from patrickstar import StepStats
from patrickstar._cli import train as training
from patrickstar._cli.progress import Progress
from patrickstar._cli.time_limit import TimeLimit
from patrickstar._cli.train import learning_rate_factor
from patrickstar._engine.run_log import RunLog, StepRecord
from patrickstar._models.model_source import find_model
from patrickstar._models.presets import TRAINED_PRESETS
from patrickstar._report.run_file import read_run
from patrickstar.errors import ConfigError

RECORD = StepRecord(3, 0.5, StepStats(steps=1), loss=2.5, learning_rate=1e-3, gradient_norm=1.0, tokens=512)

pytestmark = pytest.mark.usefixtures("one_thread", "small_text")


def losses() -> list[float]:
    return [record["loss"] for record in read_log("step")]


def losses_of(*words: object) -> list[float]:
    trained("--warmup-steps", 2, *words)
    return losses()


def test_a_run_learns_logs_and_sums_up() -> None:
    result = trained("--steps", 8, "--sequence", 32, "--batch", 4, "--warmup-steps", 2)
    *steps, summary = read_log()
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert {record["kind"] for record in steps} == {"step"}
    (described,) = read_log("run")
    assert described["parameters"] == summary["parameters"]
    assert described["names"]["0"][0] == "transformer.wte.weight"
    assert [each["step"] for each in read_log("timeline")] == [1, 2, 4, 8]
    assert all(record["tokens"] == 4 * 32 and record["device_peak_model_bytes"] > 0 for record in steps)
    assert steps[0]["learning_rate"] == pytest.approx(5e-3)
    assert steps[2]["learning_rate"] == pytest.approx(1e-2)
    assert steps[0]["loss"] == pytest.approx(math.log(300), rel=0.05)

    assert summary["kind"] == "summary"
    assert (summary["steps"], summary["interrupted"]) == (8, False)
    model = find_model("model.json")._build()
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert summary["model_data_bytes"] >= 14 * summary["parameters"]
    assert summary["loss_first"] == pytest.approx(sum(losses()[:3]) / 3)
    assert summary["loss_last"] == pytest.approx(sum(losses()[-3:]) / 3)
    assert summary["loss_last"] < summary["loss_first"] - 0.3
    assert summary["h2d_bytes"] == sum(record["h2d_bytes"] for record in steps)

    assert "step 8/8  loss" in result.stdout
    for name in ("machine", "model data", "tokens/s", "moved per step", "device peak", "evictions", "stalled"):
        assert f"\n{name}  " in result.stdout


def test_the_seed_fixes_the_run() -> None:
    runs = {}
    for seed in (1, 1, 2):
        runs.setdefault(seed, []).append(losses_of("--steps", 2, "--seed", seed))
    assert runs[1][0] == runs[1][1]
    assert runs[1][0] != runs[2][0]


def test_training_options_reach_the_engine() -> None:
    plain = losses_of("--steps", 2, "--precision", "fp32")
    same = ["--activation-checkpointing", "--activation-offload", "--chunk-size", "64KiB", "--host-memory", "1GiB"]
    assert losses_of("--steps", 2, "--precision", "fp32", *same) == plain
    assert losses_of("--steps", 2, "--precision", "bf16") != plain
    assert losses_of("--steps", 2, "--precision", "fp32", "--tiled-loss") == pytest.approx(plain, rel=1e-5)
    trained("--steps", 2, "--precision", "fp16", "--max-norm", 0)
    assert all(step["loss_scale"] > 1 and step["gradient_norm"] is None for step in read_log("step"))


def test_delayed_updates_show_after_one_more_step() -> None:
    exact = losses_of("--steps", 5)
    result = trained("--steps", 5, "--warmup-steps", 2, "--delay-from", 2)
    assert losses()[:2] == exact[:2] and losses()[2] == pytest.approx(exact[2], abs=0.5)
    assert losses()[2:] != exact[2:]
    assert [step["staleness"] for step in read_log("step")] == [0, 0, 1, 1, 1]
    assert "\nstaleness       0.60 updates on average, 1 at most" in result.stdout
    trained("--steps", 4, "--delay-from", 0, "--accumulation", 3)


ON_DISK = ("--disk", ".", "--device-memory", "40MiB", "--host-memory", "24MiB", "--precision", "fp32")


def test_lock_free_updates_are_replayed() -> None:
    lock_free = ["--lock-free-from", 2, "--max-staleness", 2, "--update-log", "updates.jsonl"]
    recorded = losses_of("--steps", 6, *ON_DISK, *lock_free)
    assert '"step":' in Path("updates.jsonl").read_text()
    assert losses_of("--steps", 6, *ON_DISK, "--replay", "updates.jsonl") == recorded
    in_memory = ["--precision", "fp32", "--replay", "updates.jsonl"]
    assert losses_of("--steps", 6, *in_memory) == recorded
    assert_refused(train("--steps", 7, *in_memory), "ends with step 6: use --steps 6 or less instead of 7")


def test_a_durable_run_saves_as_often_as_costs_little_and_continues() -> None:
    Path("pages").mkdir()
    losses_of("--steps", 3, *ON_DISK, "--save-every", 3, "--save-to", "whole")
    expected = losses_of("--steps", 5, *ON_DISK, "--resume", "whole")
    result = trained("--warmup-steps", 2, "--steps", 3, *ON_DISK, "--durable", "--disk", "pages")
    # All states are in memory.
    shown = (
        "after every 34 steps: a checkpoint writes the states in memory again, which is so at most 3 % of what steps"
    )
    assert (
        f"\ncheckpoints     {shown} write; a crash loses at most 35 steps; --save-every 1 saves each one"
        in result.stdout
    )
    assert [path.name for path in Path("pages/steps").iterdir()] == ["step-3"]
    losses_of("--steps", 5, *ON_DISK, "--durable", "--disk", "pages", "--resume", "pages/steps", "--save-every", 1)
    assert losses() == expected
    assert [path.name for path in Path("pages/steps").iterdir()] == ["step-5"]
    assert "a crash loses the step that runs, and at most the one before" in training._durable_text(1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--disk-capacity", "1GiB"], "--disk-capacity 1GiB requires --disk"),
        (["--disk", "nowhere"], "directory nowhere can't be used: No such file or directory; create it"),
        (["--disk", ".", "--disk-capacity", "much"], "--disk-capacity: 'much' is not a size"),
        (("--delay-from", 2, "--lock-free-from", 2), "--delay-from and --lock-free-from exclude each other"),
        (("--in-backward",), "add --max-norm 0"),
        (("--in-backward", "--max-norm", 0, "--accumulation", 2), "--in-backward and --accumulation 2 exclude"),
        (("--in-backward", "--max-norm", 0, "--delay-from", 2), "--in-backward and --delay-from exclude each other"),
        (("--replay", "log", "--lock-free-from", 2), "--lock-free-from and --replay exclude each other"),
        (("--update-log", "log"), "requires --lock-free-from"),
        (("--replay", "no such log"), "can't be read"),
        (("--model", "t5-60m", "--sequence", 2001), "use --sequence from 2 to 2000"),
        (("--model", "t5-60m", "--vocab-size", 300), "use 357 or more"),
    ],
)
def test_options_that_can_not_be_used(words: Any, says: str) -> None:
    assert_told(train("--steps", 1, *words), says)


def test_accumulated_batches_are_one_larger_batch() -> None:
    whole = losses_of("--steps", 3, "--precision", "fp32", "--batch", 4)
    parts = losses_of("--steps", 3, "--precision", "fp32", "--batch", 2, "--accumulation", 2)
    assert parts == pytest.approx(whole, rel=1e-4)


def test_a_local_folder_goes_on_from_its_weights() -> None:
    build, _ = find_model("model.json").open()
    assert callable(build)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is as likely as every other, which no other start has
    Path("folder").mkdir()
    Path("model.json").rename("folder/config.json")
    save_file(dict(model.named_parameters()), "folder/model.safetensors")
    result = trained("--model", "folder", "--steps", 1, "--precision", "fp32", "--quiet")
    assert losses()[0] == pytest.approx(math.log(300), rel=1e-6)
    assert result.stdout.startswith("\nmachine"), "a quiet run leaves the summary"


@pytest.mark.parametrize("name", ["t5-60m", "switch-3m"])
def test_a_model_with_an_encoder_learns_to_write_spans(name: str, recwarn: pytest.WarningsRecorder) -> None:
    shape = replace(TRAINED_PRESETS[name], layers=2, hidden=64, heads=2)
    file = Path("encoder.json")
    file.write_text(json.dumps(shape.config().to_dict() | {"d_ff": 128, "num_sparse_encoder_layers": 1}))
    words = "--model", file, "--vocab-size", 600, "--steps", 6, "--sequence", 40, "--batch", 4
    first = losses_of(*words)
    assert first[-1] < first[0]
    assert losses_of(*words) == first
    assert bool([each for each in recwarn if "dry run" in str(each.message)]) == (name == "switch-3m")


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    result = train("--steps", 9, "--lr", 1e30, "--warmup-steps", 0, "--precision", "fp32", "--max-norm", 0)
    assert_refused(result)
    assert result.stderr.startswith("error: the loss is nan in step 2; try a lower --lr than 1e+30")
    assert len(read_log()) == 1


def test_ctrl_c_ends_a_run_with_its_summary() -> None:
    arguments = ["train", *map(str, SMALL), "--steps", "1000000"]
    (process,) = ranks.start(1, main, {"arguments": arguments, "folder": os.getcwd()})
    while process.poll() is None and "step       3/" not in Path(process.log.name).read_text():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    (ended,) = ranks.wait([process])
    assert ended.code == 130 and "Traceback" not in ended.text, ended.text
    assert ", interrupted in " in ended.text
    *steps, summary = read_log()
    assert summary["kind"] == "summary"
    assert summary["interrupted"]
    assert summary["steps"] == len(steps) >= 3


def test_the_learning_rate_rises_and_then_falls_along_a_cosine() -> None:
    factors = [learning_rate_factor(step, 4, 20) for step in range(21)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[12] == pytest.approx(0.55)
    assert factors[20] == pytest.approx(0.1)
    assert learning_rate_factor(0, 0, 1) == 1.0
    assert learning_rate_factor(3, 10, 4) == pytest.approx(0.4)


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "log.jsonl"
    with RunLog(path) as log:
        stats = StepStats(steps=1, evictions=7)
        log.write_step(StepRecord(1, 0.1, stats, loss=math.inf, learning_rate=1e-3, gradient_norm=math.nan, tokens=4))
    record = json.loads(path.read_text())
    assert (record["kind"], record["loss"], record["gradient_norm"], record["evictions"]) == ("step", None, None, 7)
    assert "steps" not in record


def test_progress_is_plain_lines_in_a_file_and_a_bar_in_a_terminal() -> None:
    stats = StepStats(steps=1, disk_bytes=5 << 20, stall_s=0.1, host_peak_model_bytes=3 << 20)
    for terminal in (False, True):
        out = io.StringIO()
        with Progress(Console(file=out, force_terminal=terminal, width=150), 10, 2**30, TimeLimit(None)) as progress:
            progress.show(replace(RECORD, stats=stats))
            progress.show(replace(RECORD, step=4, stats=stats))
        shown = out.getvalue()
        figures = "loss 2.5000  1,024 tokens/s  device 0 B and 0 B of 1.00 GiB  host 3.00 MiB  disk 5.00 MiB  moved 0 B"
        assert f"{figures}  waiting 20%" in shown
        assert ("\x1b" in shown) is terminal
        # A file gets whole lines, a terminal a bar that is drawn over; both get the time that is left.
        assert shown.count(f"step  3/10  {figures}") == (0 if terminal else 1)
        assert "0:00:04 left" in shown and "0:00:03 left" in shown
        assert ("step 1 is running" in shown) is terminal  # before the first one has ended
        out = io.StringIO()
        with Progress(Console(file=out, force_terminal=terminal), 10, 2**30, TimeLimit(None), quiet=True) as progress:
            progress.show(RECORD)
        assert out.getvalue() == ""


# TensorBoard

WITHOUT = {tag for tag in FIELDS if tag.partition("/")[0] in ("disk", "collectives", "staleness")}
"""Scalars that only some runs have."""


ONES = (torch.ones(2, 8),)


def small_engine() -> ps.Engine:
    return ps.initialize(nn.Linear(8, 8), ps.Config(device="cpu"))[0]


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
                run_step(engine, ONES)
    found = scalars_in(Path("events"))
    assert not {"train/loss", "train/learning_rate", "train/gradient_norm", "train/tokens_per_s"} & found.keys()
    assert list(found["time/step_s"]) == [1, 2]


def test_a_run_that_fails_before_its_first_step_leaves_the_events_unchanged() -> None:
    with small_engine() as engine, engine.record(tensorboard="events"):
        run_step(engine, ONES)
    before = scalars_in(Path("events"))
    with small_engine() as engine, pytest.raises(RuntimeError), engine.record(tensorboard="events"):
        raise RuntimeError
    assert scalars_in(Path("events")) == before


def test_events_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        with pytest.raises(ConfigError, match=r"the log text.py for TensorBoard can't be written: File exists"):
            engine.record(tensorboard="text.py")
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            engine.record(tensorboard="events")
    assert_refused(train("--tensorboard", "events"), "error: a log for TensorBoard needs its package")
    assert not Path("events").exists() and not Path("log.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "share"),
    [([], None), (["--activation-checkpointing"], 1.0), (["--checkpointing-share", 0.5], 0.5)],
)
def test_layers_are_recomputed_as_asked(monkeypatch, words, share):
    configs = []
    monkeypatch.setattr(training, "create_engine", lambda model, config, *more: configs.append(config) or sys.exit(7))
    assert call("train", *SMALL, "--steps", 1, *words).exit_code == 7
    assert configs[0].activation_checkpointing == share
