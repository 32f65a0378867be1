"""`torchrun -m patrickstar train`: several processes train like one process with the same batches."""

import json
import os
import subprocess
import sys

import pytest

import patrickstar.__main__

from . import ranks

NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

SIZES = {"n_layer": 1, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 300}
MODEL = {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0, **SIZES, **NO_DROPOUT}


def options(folder, log, *words, model=MODEL):
    """Return the arguments of a short run of a tiny model: most of the time is that of its dry run."""
    (folder / "text.txt").write_text("".join(f"the square of {i} is {i * i}\n" for i in range(800)))
    (folder / "model.json").write_text(json.dumps(model))
    arguments = ["train", "--model", str(folder / "model.json"), "--data", str(folder / "text.txt")]
    arguments += ["--sequence", "16", "--steps", "3", "--precision", "fp32", "--device", "cpu"]
    return [*arguments, "--log-file", str(log), *words]


def train_by_torchrun(folder, arguments, processes):
    """Run the command in new interpreters, which torchrun starts; return what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "patrickstar", *arguments]
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=ranks.WITHIN_S, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main(arguments: list[str], folder: str, without: str = "") -> None:
    """In each process: the command, with the environment that torchrun sets."""
    os.chdir(folder)
    os.environ["HOME"] = folder
    os.environ.pop(without, None)
    sys.argv = ["patrickstar", *arguments]
    patrickstar.__main__.main()


def train_forked(folder, arguments, processes):
    """Run the command in forked processes, and return how each has ended."""
    return ranks.wait(ranks.start(processes, main, {"arguments": arguments, "folder": str(folder)}))


def train(folder, arguments, processes):
    """Run the command in forked processes; return what they print."""
    all_ended = train_forked(folder, arguments, processes)
    ranks.check_ended(all_ended, [0] * processes)
    return "".join(ended.text for ended in all_ended)


def records(log):
    """Return the records of steps and the summary."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["kind"] in ("step", "summary")]


def losses(log):
    return [(record["step"], record["loss"], record["gradient_norm"]) for record in records(log)[:-1]]


def check_near(log, other):
    """Assert the same steps, tokens and losses, up to the order of summation."""
    for one, two in zip(records(log)[:-1], records(other)[:-1], strict=True):
        assert (one["step"], one["tokens"]) == (two["step"], two["tokens"])
        assert abs(one["loss"] - two["loss"]) < 1e-4


@pytest.mark.parametrize("train_on_two", [train, pytest.param(train_by_torchrun, marks=pytest.mark.slow)])
def test_train_on_two_processes(tmp_path, train_on_two):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    train(tmp_path, options(tmp_path, one, "--batch", "4"), 1)
    printed = train_on_two(tmp_path, options(tmp_path, two, "--batch", "2"), 2)
    assert printed.count("step 3/3") == 1, "rank 0 alone prints"
    check_near(one, two)
    whole, part = records(one)[-1], records(two)[-1]
    assert part["processes"] == 2
    assert abs(part["model_data_bytes"] * 2 - whole["model_data_bytes"]) < 0.05 * whole["model_data_bytes"]
    assert part["gathered_bytes"] > 0 and part["reduced_bytes"] > 0


def test_a_rank_without_others_is_refused(tmp_path):
    arguments = options(tmp_path, tmp_path / "log")
    call = {"arguments": arguments, "folder": str(tmp_path), "without": "MASTER_ADDR"}
    (ended,) = ranks.wait(ranks.start(1, main, call, env=[{"WORLD_SIZE": "2"}]))
    assert ended.code == 2
    assert "error: RANK and WORLD_SIZE say that this is one of 2 processes" in ended.text
    assert "MASTER_ADDR" in ended.text and "torchrun" in ended.text


@pytest.mark.slow
def test_each_process_prints_an_error(tmp_path):
    for ended in train_forked(tmp_path, options(tmp_path, tmp_path / "log", "--device-memory", "64KiB"), 2):
        assert ended.code != 0
        assert ended.text.count("error: the model data of") == 1


def test_resuming_on_two_processes_and_on_one(tmp_path):
    whole, rest, alone = (tmp_path / name for name in ("whole.jsonl", "rest.jsonl", "alone.jsonl"))
    words = ["--batch", "2", "--steps", "4", "--save-every", "2", "--save-to", "saved", "--keep", "9"]
    train(tmp_path, options(tmp_path, whole, *words), 2)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-2", "step-4"]
    assert sorted(path.name for path in (tmp_path / "saved" / "step-2").iterdir()) == [
        "checkpoint.jsonl",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    resume = ["--steps", "4", "--resume", "saved/step-2"]
    assert train(tmp_path, options(tmp_path, rest, "--batch", "2", *resume), 2).count("resumed from") == 1
    assert losses(rest) == losses(whole)[2:]
    train(tmp_path, options(tmp_path, alone, "--batch", "4", *resume), 1)
    check_near(alone, rest)
