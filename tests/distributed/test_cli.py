"""`torchrun -m patrickstar train`: several processes train like one process with the same batches."""

import json
import os
import subprocess
import sys


def run(folder, log, *words, processes=1):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *torchrun, "-m", "patrickstar", "train", "--model", "gpt-1m", "--vocab-size", "300"]
    command += ["--data", str(folder / "text.txt"), "--sequence", "16", "--steps", "3", "--precision", "fp32"]
    command += ["--device", "cpu", "--log-file", str(log), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(folder)})


def records(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_train_on_two_processes(tmp_path):
    (tmp_path / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    done = run(tmp_path, one, "--batch", "4")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, two, "--batch", "2", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 3/3") == 1, "only one process prints"
    (*alone, whole), (*shared, part) = records(one), records(two)
    for a, b in zip(alone, shared, strict=True):
        assert a["tokens"] == b["tokens"]
        assert abs(a["loss"] - b["loss"]) < 1e-4
    assert part["processes"] == 2
    assert abs(part["model_data_bytes"] * 2 - whole["model_data_bytes"]) < 0.05 * whole["model_data_bytes"]
    assert part["gathered_bytes"] > 0 and part["reduced_bytes"] > 0


def test_rank_without_a_rendezvous_is_refused(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Hello. " * 500)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    done = run(tmp_path, tmp_path / "log")
    assert done.returncode == 2
    assert "error: RANK and WORLD_SIZE say that this is one of 2 processes" in done.stderr
    assert "MASTER_ADDR" in done.stderr and "torchrun" in done.stderr


def test_each_process_prints_an_error(tmp_path):
    (tmp_path / "text.txt").write_text("Hello. " * 500)
    done = run(tmp_path, tmp_path / "log", "--device-memory", "64KiB", processes=2)
    assert done.returncode != 0
    assert done.stderr.count("error: the model data of") == 2


def losses(log):
    return [(record["step"], record["loss"], record["gradient_norm"]) for record in records(log)[:-1]]


def test_resuming_on_two_processes_and_on_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)
    whole, rest, alone = (tmp_path / name for name in ("whole.jsonl", "rest.jsonl", "alone.jsonl"))
    words = ["--steps", "4", "--save-every", "2", "--save-to", "kept", "--keep", "9"]
    done = run(tmp_path, whole, "--batch", "2", *words, processes=2)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-2", "step-4"]
    assert sorted(path.name for path in (tmp_path / "kept" / "step-2").iterdir()) == [
        "checkpoint.jsonl",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    done = run(tmp_path, rest, "--batch", "2", "--steps", "4", "--resume", "kept/step-2", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed from") == 1
    assert losses(rest) == losses(whole)[2:]
    done = run(tmp_path, alone, "--batch", "4", "--steps", "4", "--resume", "kept/step-2")
    assert done.returncode == 0, done.stderr
    for (step, loss, _), (other_step, other_loss, _) in zip(losses(alone), losses(rest), strict=True):
        assert step == other_step and abs(loss - other_loss) < 1e-4, "another order of summation"
