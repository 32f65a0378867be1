"""`make gpu DEVICE=cpu`: the calls of the GPU run at a small size, and how programs take turns."""

import itertools
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gpu
import psutil
import pytest
from gpu_stages.record import Check, End, Fact, Figure, Record
from gpu_stages.results import Results
from gpu_stages.turns import Program, run_turns

ROOT = Path(__file__).parents[2]
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


def test_a_turn_begins_when_the_last_one_has_ended():
    names = ["first", "beside it"], ["second"]
    turns = [[program(name, "note_time", options={"sleep_s": 0.5}) for name in turn] for turn in names]
    found = collect(turns)
    begin, end = ({name: entries[n].measured for name, entries in found.items()} for n in (0, 1))
    assert begin["second"] >= max(end["first"], end["beside it"])
    assert max(begin["first"], begin["beside it"]) < min(end["first"], end["beside it"])
    assert all(entries[-1].problem == "" for entries in found.values())


def test_a_failure_is_printed_when_it_happens_and_costs_no_other_program(capfd):
    found = collect([[program("bad", "fail")], [program("good", "note_time", options={"sleep_s": 0})]])
    assert found["bad"][0] == Check("before the failure", True) and found["bad"][1].problem == "exit code 1"
    assert found["good"][-1].problem == ""
    printed = capfd.readouterr().out
    assert printed.index("[bad] RuntimeError: made to fail") < printed.index("[good]")


def test_a_program_without_its_turn_in_time_has_no_result():
    found = collect([[program("hangs", "hang", limit_s=1000)], [program("late", "fail")]], limit_s=3)
    pid, end = found["hangs"]
    assert end.problem.startswith("killed at its limit of ")
    assert not psutil.pid_exists(pid.measured) or psutil.Process(int(pid.measured)).status() == psutil.STATUS_ZOMBIE
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
