"""`patrickstar train` from end to end, on models of a few thousand parameters."""

import io
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from patrickstar import StepStats
from patrickstar._cli.console import Progress
from patrickstar._cli.main import app
from patrickstar._cli.time_limit import TimeLimit
from patrickstar._cli.train import learning_rate_factor
from patrickstar._engine.run_log import RunLog, StepRecord
from patrickstar._models.model_source import find_model

CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 300,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
RECORD = StepRecord(
    step=3, loss=2.5, learning_rate=1e-3, gradient_norm=1.0, tokens=512, elapsed_s=0.5, stats=StepStats(steps=1)
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A model, text and sizes that take no time; later options win over these."""
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(200)))
    model = tmp_path / "model.json"
    model.write_text(json.dumps(CONFIG))
    shape = ["--model", str(model), "--data", str(text), "--sequence", "32", "--batch", "4"]
    return [*shape, "--device", "cpu", "--lr", "1e-2", "--warmup-steps", "2", "--log", str(tmp_path / "log.jsonl")]


def run(options: list[str], *more: object) -> Result:
    return CliRunner().invoke(app, ["train", *options, *map(str, more)])


def read_log(options: list[str], *kinds: str) -> list[dict[str, Any]]:
    """Return the lines of these kinds, by default those of steps and the summary."""
    lines = [json.loads(line) for line in Path(options[-1]).read_text().splitlines()]
    return [line for line in lines if line["kind"] in (kinds or ("step", "summary"))]


def losses(options: list[str]) -> list[float]:
    return [record["loss"] for record in read_log(options) if record["kind"] == "step"]


@pytest.mark.usefixtures("one_thread")
def test_a_run_learns_logs_and_sums_up(options: list[str]) -> None:
    result = run(options, "--steps", 8)
    assert result.exit_code == 0, result.output
    *steps, summary = read_log(options)
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert {record["kind"] for record in steps} == {"step"}
    (described,) = read_log(options, "run")
    assert described["parameters"] == summary["parameters"]
    assert described["names"]["0"][0] == "transformer.wte.weight"
    assert [each["step"] for each in read_log(options, "timeline")] == [1, 2, 4, 8]
    assert all(record["tokens"] == 4 * 32 and record["device_peak_model_bytes"] > 0 for record in steps)
    assert steps[0]["learning_rate"] == pytest.approx(5e-3)
    assert steps[2]["learning_rate"] == pytest.approx(1e-2)
    assert steps[0]["loss"] == pytest.approx(math.log(300), rel=0.05)

    assert summary["kind"] == "summary"
    assert (summary["steps"], summary["interrupted"]) == (8, False)
    assert summary["parameters"] == sum(
        parameter.numel() for parameter in find_model(options[1])._build(False).parameters()
    )
    assert summary["model_data_bytes"] >= 14 * summary["parameters"]
    assert summary["loss_first"] == pytest.approx(sum(losses(options)[:3]) / 3)
    assert summary["loss_last"] == pytest.approx(sum(losses(options)[-3:]) / 3)
    assert summary["loss_last"] < summary["loss_first"] - 0.3
    assert summary["h2d_bytes"] == sum(record["h2d_bytes"] for record in steps)

    assert "step 8/8  loss" in result.stdout
    for name in ("machine", "model data", "tokens/s", "moved per step", "device peak", "evictions", "stalled"):
        assert f"\n{name}  " in result.stdout


@pytest.mark.usefixtures("one_thread")
def test_the_seed_fixes_the_run(options: list[str]) -> None:
    runs = {}
    for seed in (1, 1, 2):
        assert run(options, "--steps", 2, "--seed", seed).exit_code == 0
        runs.setdefault(seed, []).append(losses(options))
    assert runs[1][0] == runs[1][1]
    assert runs[1][0] != runs[2][0]


@pytest.mark.usefixtures("one_thread")
def test_training_options_reach_the_engine(options: list[str]) -> None:
    assert run(options, "--steps", 2, "--precision", "fp32").exit_code == 0
    plain = losses(options)
    same = ["--activation-checkpointing", "--activation-offload", "--chunk-size", "64KiB", "--host-memory", "1GiB"]
    assert run(options, "--steps", 2, "--precision", "fp32", *same).exit_code == 0
    assert losses(options) == plain
    assert run(options, "--steps", 2, "--precision", "bf16").exit_code == 0
    assert losses(options) != plain
    assert run(options, "--steps", 2, "--precision", "fp16", "--max-norm", 0).exit_code == 0
    assert all(step["loss_scale"] > 1 and step["gradient_norm"] is None for step in read_log(options)[:-1])


@pytest.mark.usefixtures("one_thread")
def test_delayed_updates_show_after_one_more_step(options: list[str]) -> None:
    assert run(options, "--steps", 5).exit_code == 0
    exact = losses(options)
    result = run(options, "--steps", 5, "--delay-from", 2)
    assert result.exit_code == 0, result.output
    assert losses(options)[:2] == exact[:2] and losses(options)[2] == pytest.approx(exact[2], abs=0.5)
    assert losses(options)[2:] != exact[2:]
    assert [step["staleness"] for step in read_log(options)[:-1]] == [0, 0, 1, 1, 1]
    assert "\nstaleness       0.60 updates on average, 1 at most" in result.stdout
    assert run(options, "--steps", 4, "--delay-from", 0, "--accumulation", 3).exit_code == 0


@pytest.mark.usefixtures("one_thread")
def test_lock_free_updates_are_replayed(options: list[str], tmp_path: Path) -> None:
    on_disk = ["--disk", tmp_path, "--device-memory", "40MiB", "--host-memory", "24MiB", "--precision", "fp32"]
    log = tmp_path / "updates.jsonl"
    result = run(options, "--steps", 6, *on_disk, "--lock-free-from", 2, "--max-staleness", 2, "--update-log", log)
    assert result.exit_code == 0, result.output
    assert '"step":' in log.read_text()
    recorded = losses(options)
    result = run(options, "--steps", 6, *on_disk, "--replay", log)
    assert result.exit_code == 0, result.output
    assert losses(options) == recorded
    result = run(options, "--steps", 6, "--precision", "fp32", "--replay", log)  # all in memory
    assert result.exit_code == 0 and losses(options) == recorded
    result = run(options, "--steps", 7, "--precision", "fp32", "--replay", log)
    assert result.exit_code == 2 and "ends with step 6: use --steps 6 or less instead of 7" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--delay-from", 2, "--lock-free-from", 2), "--delay-from and --lock-free-from exclude each other"),
        (("--replay", "log", "--lock-free-from", 2), "--lock-free-from and --replay exclude each other"),
        (("--update-log", "log"), "requires --lock-free-from"),
        (("--replay", "no such log"), "can't be read"),
    ],
)
def test_options_of_late_updates_that_can_not_be_used(options: list[str], arguments: Any, says: str) -> None:
    result = run(options, *arguments)
    assert result.exit_code == 2 and says in result.output and result.output.count("\n") == 1


@pytest.mark.usefixtures("one_thread")
def test_accumulated_batches_are_one_larger_batch(options: list[str]) -> None:
    assert run(options, "--steps", 3, "--precision", "fp32", "--batch", 4).exit_code == 0
    whole = losses(options)
    assert run(options, "--steps", 3, "--precision", "fp32", "--batch", 2, "--accumulation", 2).exit_code == 0
    assert losses(options) == pytest.approx(whole, rel=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_a_local_folder_goes_on_from_its_weights(options: list[str], tmp_path: Path) -> None:
    build, _ = find_model(options[1]).open(activation_checkpointing=False)
    assert callable(build)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is as likely as every other, which no other start has
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(model.named_parameters()), folder / "model.safetensors")
    result = run(options, "--model", folder, "--steps", 1, "--precision", "fp32")
    assert result.exit_code == 0, result.output
    assert losses(options)[0] == pytest.approx(math.log(300), rel=1e-6)


@pytest.mark.usefixtures("one_thread")
def test_a_loss_that_is_not_finite_ends_the_run(options: list[str]) -> None:
    result = run(options, "--steps", 9, "--lr", 1e30, "--warmup-steps", 0, "--precision", "fp32", "--max-norm", 0)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the loss is nan in step 2; try a lower --lr than 1e+30")
    assert "Traceback" not in result.output
    assert len(read_log(options)) == 1


@pytest.mark.usefixtures("one_thread")
def test_quiet_leaves_the_summary(options: list[str]) -> None:
    result = run(options, "--steps", 1, "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("\nmachine")


def test_ctrl_c_ends_a_run_with_its_summary(options: list[str]) -> None:
    command = [sys.executable, "-m", "patrickstar", "train", *options, "--steps", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and "step       3/" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert ", interrupted in " in out
    *steps, summary = read_log(options)
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
        figures = "loss 2.5000  1,024 tokens/s  device 0 B + 0 B of 1.00 GiB  host 3.00 MiB  disk 5.00 MiB  moved 0 B"
        assert f"{figures}  waiting 20%" in shown
        assert ("\x1b" in shown) is terminal
        # A file gets whole lines, a terminal a bar that is drawn over; both get the time that is left.
        assert shown.count(f"step  3/10  {figures}") == (0 if terminal else 1)
        assert "0:00:04 left" in shown and "0:00:03 left" in shown
        assert ("step 1 is running" in shown) is terminal  # before the first one has ended


def test_quiet_progress_shows_nothing() -> None:
    for terminal in (False, True):
        out = io.StringIO()
        with Progress(Console(file=out, force_terminal=terminal), 10, 2**30, TimeLimit(None), quiet=True) as progress:
            progress.show(RECORD)
        assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--disk-capacity", "1GiB"], "--disk-capacity 1GiB requires --disk"),
        (["--disk", "nowhere"], "directory nowhere can't be used: No such file or directory; create it"),
        (["--disk", ".", "--disk-capacity", "much"], "Disk: capacity: 'much' is not a size"),
    ],
)
def test_wrong_options_of_the_disk_are_told_in_one_line(options, more, says):
    result = run(options, "--steps", 1, *more)
    assert result.exit_code == 2 and says in result.output
    assert "Traceback" not in result.output
