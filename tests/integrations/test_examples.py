"""The examples run unchanged for a few steps.

`make gpu DEVICE=cpu`: the calls of the GPU run at a small size, and how programs take turns.
"""

import itertools
import json
import os
import runpy
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import psutil
import pytest
import transformers
from distributed import ranks
from gpu_stages.record import Check, End, Fact, Figure, Record
from gpu_stages.results import Results
from gpu_stages.turns import Program, run_turns
from sampling import nightly

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def main_of(example: str, kind: str = "", **smaller: Any) -> Any:
    """Return the function of an example that the command line calls.

    `make test` replaces sizes in the configuration `kind` of transformers by smaller ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        if kind and not nightly():
            config = getattr(transformers, kind)
            patch.setattr(transformers, kind, lambda **sizes: config(**sizes | smaller))
        return runpy.run_path(str(EXAMPLES / f"{example}.py"))["main"]


def test_larger_than_budget(one_thread, capsys):
    main = main_of("larger_than_budget")
    steps, most = (4, 8) if nightly() else (2, 12)
    loss, model_bytes, peak_bytes = main(steps)
    budget_bytes = 48 << 20
    assert loss < most and 0 < peak_bytes <= budget_bytes < model_bytes / 5
    assert "device budget 48.0 MiB, peak" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer(tmp_path, one_thread):
    main = main_of("trainer", "GPT2Config", n_layer=2, n_embd=192)
    options = ["--output", str(tmp_path), "--device-memory", "1GiB"]
    first = main([*options, "--steps", "1"])
    assert main([*options, "--steps", "2", "--resume"]) < first < 6
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "checkpoint-2").is_dir()


def test_accelerate_loop(tmp_path, one_thread):
    main = main_of("accelerate_loop", "GPT2Config", n_layer=2, n_embd=192)
    options = ["--save", str(tmp_path / "state"), "--device-memory", "1GiB"]
    first = main([*options, "--steps", "2"])
    (again,) = main([*options, "--steps", "1", "--resume"])
    assert again < first[0] < 6
    assert (tmp_path / "state" / "patrickstar").is_dir()


@pytest.mark.filterwarnings("ignore")  # Lightning warns of data loaders without workers, and of folders that exist
def test_lightning(tmp_path, one_thread):
    main = main_of("lightning_fit", "GPT2Config", n_layer=2, n_embd=192)
    options = ["--output", str(tmp_path), "--device-memory", "1GiB"]
    assert main([*options, "--steps", "1"]) < 6
    assert (tmp_path / "last.ckpt" / "patrickstar").is_dir()


@pytest.mark.slow
def test_lightning_with_two_processes(tmp_path):
    command = [sys.executable, EXAMPLES / "lightning_fit.py", "--output", tmp_path, "--steps", "2", "--devices", "2"]
    run = subprocess.run([*map(str, command), "--device-memory", "1GiB"], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and "peak of model data" in run.stdout, run.stdout + run.stderr
    assert (tmp_path / "last.ckpt" / "patrickstar").is_dir()


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")
def test_dpo(tmp_path, one_thread, capsys):
    main = main_of("dpo")
    margin = main(["--output", str(tmp_path), "--device-memory", "1GiB", "--steps", "2"])
    assert -5 < margin < 5 and "10,697,088 parameters of the reference model in chunks" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer_with_adapters(tmp_path, one_thread):
    main = main_of("trainer")
    assert main(["--output", str(tmp_path), "--device-memory", "1GiB", "--steps", "1", "--lora"]) < 6
    assert (tmp_path / "adapter_model.safetensors").is_file()


def experts(words: list[str], steps: int) -> None:
    """Run the example in each of four processes."""
    budget_mib = 32
    options = ["--steps", str(steps), "--device-memory", f"{budget_mib}MiB", *words]
    losses, peak_bytes = main_of("experts", "MixtralConfig", num_hidden_layers=2)(options)
    assert len(losses) == steps and losses[-1] < (0.9 if steps > 4 else 1) * losses[0]
    assert 0 < peak_bytes <= budget_mib << 20


@pytest.mark.long("an example in four processes")
@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["--tp", "2", "--ep", "4"]])
def test_experts(words):
    steps = 6 if nightly() else 3
    first, *others = ranks.run(4, experts, words=words, steps=steps)
    assert f"step {steps}: loss" in first.text and "of model data and a budget of 32MiB" in first.text
    assert not any(ended.text for ended in others), "rank 0 alone prints"


def digest(folder: Path, *options: str) -> str:
    """Return the digest of the parameters that the example prints."""
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--folder", str(folder), "--steps", "12", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "  parameters " in run.stdout, run.stdout + run.stderr
    return run.stdout.split("  parameters ")[1].split()[0]


@pytest.mark.slow
def test_a_failed_worker_of_ray_changes_no_bit(tmp_path):
    """Train in two workers, and resume after one has ended."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    whole = digest(tmp_path / "whole")
    assert digest(tmp_path / "failed", "--fail-after", "7") == whole


# The calls of the GPU run

SCRIPT = ROOT / "benchmarks" / "gpu.py"
CALLS = "tests", "steps", "micro"
PATHS = os.pathsep.join(map(str, (ROOT / "benchmarks", Path(__file__).parent)))


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True)


def collect(turns, limit_s=600.0):
    """Run turns; return their entries by program, in order."""
    found = {}
    environment = os.environ | {"PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1"}
    run_turns(turns, environment, limit_s, lambda name, entry: found.setdefault(name, []).append(entry))
    return found


def program(name, function, limit_s=600.0, **more):
    return Program(name, f"gpu_programs:{function}", limit_s, **more)


def run_here(monkeypatch, *arguments):
    """Run calls in this process, their programs too, one after the other; return the exit code."""

    def run_turns(turns, environment, limit_s, add):
        for program in itertools.chain(*turns):
            module, name = program.function.split(":")
            with monkeypatch.context() as patch:
                for variable, setting in {"GLOO_SOCKET_IFNAME": "lo", **program.settings}.items():
                    patch.setenv(variable, setting)
                patch.setattr(Record, "_add", lambda self, entry, name=program.name: add(name, entry))
                if all(find_spec(package) for package in program.imports if "." not in package):
                    getattr(import_module(module), name)(Record(), SimpleNamespace(**program.options))
            add(program.name, End(1.0, ""))

    found = subprocess.CompletedProcess([], 0, "a machine", "")
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "run_turns", run_turns)
        patch.setattr(gpu, "probe", lambda device, environment: found)
        patch.setattr(sys, "argv", ["gpu.py", *arguments])
        return gpu.main()


def check_results(folder, call, printed):
    text = (folder / f"gpu-{call}-cpu.md").read_text()
    first, *lines = [json.loads(line) for line in (folder / f"gpu-{call}-cpu.jsonl").read_text().splitlines()]
    assert first["machine"] in text and "FAILED" not in text
    ends = {line["program"]: line for line in lines if line["kind"] == "End"}
    assert ends and not any(end["problem"] for end in ends.values())
    assert all(f"| {name} | {end['seconds']:.0f} |" in printed for name, end in ends.items())
    if call == "steps":
        logs = list(folder.glob("gpu-steps-3b-*.jsonl"))
        assert logs and all(log.read_text().count('"kind": "timeline"') == 2 for log in logs)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_call_runs_writes_its_results_and_is_resumed(tmp_path, call):
    done = run(call, "--device", "cpu", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    text = check_results(tmp_path, call, done.stdout)
    again = run(call, "--device", "cpu", "--output", str(tmp_path))
    assert again.returncode == 0 and "@result" not in again.stdout, "a program that has passed ran again"
    assert text == (tmp_path / f"gpu-{call}-cpu.md").read_text()


@pytest.mark.long("trains with the engine and with FSDP2")
@pytest.mark.filterwarnings("default")  # as in processes of their own
def test_the_steps_run_in_this_process(tmp_path, monkeypatch, capsys):
    arguments = "steps", "--device", "cpu", "--output", str(tmp_path)
    assert run_here(monkeypatch, *arguments) == 0
    text = check_results(tmp_path, "steps", capsys.readouterr().out)
    assert run_here(monkeypatch, *arguments) == 0 and "loss" not in capsys.readouterr().out
    assert text == (tmp_path / "gpu-steps-cpu.md").read_text()


def test_a_turn_begins_when_the_last_one_has_ended(tmp_path):
    names, options = (["first", "beside it"], ["second"]), {"folder": str(tmp_path), "together": 2}
    turns = [[program(name, "note_time", options=options) for name in turn] for turn in names]
    found = collect(turns)
    begin, end = ({name: entries[n].measured for name, entries in found.items()} for n in (0, 1))
    assert begin["second"] >= max(end["first"], end["beside it"])
    assert max(begin["first"], begin["beside it"]) < min(end["first"], end["beside it"])
    assert all(entries[-1].problem == "" for entries in found.values())


def test_a_failure_is_printed_when_it_happens_and_costs_no_other_program(capfd, tmp_path):
    options = {"folder": str(tmp_path), "together": 0}
    found = collect([[program("bad", "fail")], [program("good", "note_time", options=options)]])
    assert found["bad"][0] == Check("before the failure", True) and found["bad"][1].problem == "exit code 1"
    assert found["good"][-1].problem == ""
    printed = capfd.readouterr().out
    assert printed.index("[bad] RuntimeError: made to fail") < printed.index("[good]")


def test_a_program_without_its_turn_in_time_has_no_result():
    found = collect([[program("hangs", "hang", limit_s=1000)], [program("late", "fail")]], limit_s=3)
    pid, end = found["hangs"]
    assert end.problem.startswith("killed at its limit of ")
    ends = time.monotonic() + 60
    while psutil.pid_exists(pid.measured) and psutil.Process(int(pid.measured)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends, "it was killed and goes on"
        time.sleep(0.01)  # a busy system ends it late
    assert found["late"] == [End(0.0, "no time left")]


def test_a_program_whose_package_is_missing_is_left_out():
    found = collect([[program("missing", "fail", imports=["no_such_package"])]])
    left_out, end = found["missing"]
    assert left_out == Fact("left out", "no_such_package is not installed") and end.problem == ""


def test_only_what_has_passed_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    results = Results(path, "a machine", "title")
    for name, check, problem in (("good", True, ""), ("wrong", False, ""), ("killed", True, "killed")):
        results.add(name, Figure("step", 2.0, "s"))
        results.add(name, Check("check", check))
        results.add(name, End(1.0, problem))
    results.add("cut off", Figure("step", 1.0, "s"))
    again = Results(path, "a machine", "title")
    assert [name for name in ("good", "wrong", "killed", "cut off") if again.passed(name)] == ["good"]
    again.write()
    assert "| good | 1 | passed, 2.000 s per step |" in path.with_suffix(".md").read_text()
    assert "killed" not in path.read_text()


def test_invalid_arguments_are_rejected(monkeypatch, capsys):
    done = run("tets")
    assert done.returncode == 2 and "unknown call 'tets': the calls are tests, steps, micro" in done.stderr
    for arguments, message in (
        (["--minutes", "0"], "--minutes must be more than 0"),
        (["--device", "tpu"], "--device must be cuda or cpu, not 'tpu'"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            gpu.main()
        assert message in capsys.readouterr().err
