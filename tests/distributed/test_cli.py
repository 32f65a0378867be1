"""`torchrun -m patrickstar train`: several processes train like one process with the same batches.

With --tp, --ep and --replicas meshes train as plain data parallelism does. After a restart by torchrun the command
resumes by itself, and its log is that of one run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain

import pytest
import torch
import transformers
from integrations import tiny

import patrickstar.__main__
from patrickstar import Checkpoints
from patrickstar._cli import train as command

from . import ranks, restarts
from .restarts import agent_store

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


# Meshes

LLAMA = tiny.SIZES | {"model_type": "llama", "vocab_size": 300, "tie_word_embeddings": True}
MIXTRAL = tiny.SIZES | tiny.EXPERTS | {"model_type": "mixtral", "vocab_size": 300, "num_local_experts": 4}


def arguments(folder, log, batch, *words):
    """Return the arguments of a short run with a number of sequences per batch."""
    return options(folder, folder / log, "--batch", str(batch), *words, model=MIXTRAL)


@pytest.mark.slow
def test_meshes_train_like_data_parallelism(tmp_path):
    train(tmp_path, arguments(tmp_path, "plain", 2), 2)
    whole = records(tmp_path / "plain")[-1]
    for name, batch, words, text in [
        ("tensors and experts", 2, ["--tp", "2", "--ep", "4"], "4 processes: 2 batches, tp 2, ep 4"),
        ("replicas", 1, ["--ep", "2", "--replicas", "2"], "4 processes: 4 batches, ep 2, 2 replicas"),
    ]:
        printed = train(tmp_path, arguments(tmp_path, name, batch, *words), 4)
        assert printed.count(f"\n{text}\n") == 1 and printed.count(f"mesh            {text};") == 1, printed
        check_near(tmp_path / name, tmp_path / "plain")
        summary = records(tmp_path / name)[-1]
        assert summary["parameters"] == whole["parameters"], "those of the whole model"
        given = {word.removeprefix("--"): int(size) for word, size in zip(words[::2], words[1::2], strict=True)}
        assert {key: summary[key] for key in given} == given and summary["processes"] == 4
        assert summary["model_data_bytes"] < 0.7 * whole["model_data_bytes"]


def print_batches(arguments: list[str], folder: str) -> None:
    """Run the command; print the seed and a number for each batch. Runs in each process."""
    compute = command._gradients

    def step(run, batches):
        ids = next(batches)
        print(f"batch {torch.initial_seed()} {hash(tuple(ids.flatten().tolist()))}")
        return compute(run, chain([ids], batches))

    command._gradients = step
    main(arguments, folder)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [pytest.param(LLAMA, ["--tp", "2"], marks=pytest.mark.slow), (MIXTRAL, ["--tp", "2", "--ep", "4"])],
)
def test_a_model_folder_trains_alike_and_processes_of_a_tensor_group_share_batch_and_seed(tmp_path, sizes, words):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[sizes["model_type"]](**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "folder")
    same = ["--model", str(tmp_path / "folder"), "--seed", "5", "--steps", "2"]
    train(tmp_path, arguments(tmp_path, "plain", 2, *same), 2)
    call = {"arguments": arguments(tmp_path, "mesh", 2, *words, *same), "folder": str(tmp_path)}
    all_ended = ranks.run(4, print_batches, **call)
    check_near(tmp_path / "mesh", tmp_path / "plain")
    lines = [[line for line in ended.text.splitlines() if line.startswith("batch")] for ended in all_ended]
    assert lines[0] == lines[1] and lines[2] == lines[3]
    assert [line.split()[1] for line in (lines[0][0], lines[2][0])] == ["5", "6"]
    assert not {line.split()[2] for line in lines[0]} & {line.split()[2] for line in lines[2]}


@pytest.mark.slow
def test_a_run_resumes_on_any_mesh(tmp_path):
    words = ["--steps", "4", "--save-every", "2", "--save-to", str(tmp_path / "saved")]
    resume = ["--steps", "4", "--resume", str(tmp_path / "saved" / "step-2")]
    train(tmp_path, arguments(tmp_path, "whole", 2, *words, "--tp", "2", "--ep", "4"), 4)
    train(tmp_path, arguments(tmp_path, "same", 2, *resume, "--tp", "2", "--ep", "4"), 4)
    assert losses(tmp_path / "same") == losses(tmp_path / "whole")[2:]
    for name, batch, mesh, processes in [("two", 2, ["--ep", "2"], 2), ("plain", 2, [], 2)]:
        train(tmp_path, arguments(tmp_path, name, batch, *resume, *mesh), processes)
        check_near(tmp_path / name, tmp_path / "same")


@pytest.mark.parametrize(
    ("processes", "words", "error"),
    [
        (3, ["--tp", "2"], "error: 3 processes can't be divided into --replicas 1 times groups of --tp 2"),
        (2, ["--tp", "2", "--model", "gpt-1m"], "no tensor-parallel plan for a GPT2LMHeadModel (gpt-1m)"),
        (2, ["--tp", "2", "--dry-run"], "error: --dry-run simulates all processes in one"),
    ],
)
def test_what_can_not_be_divided_is_refused_in_each_process(tmp_path, processes, words, error):
    for ended in train_forked(tmp_path, arguments(tmp_path, "log", 2, *words), processes):
        assert ended.code == 2
        assert ended.text.count("error: ") == 1 and error in ended.text, ended.text
    assert not (tmp_path / "log").exists()


# Restarts

STEPS = 6


def main_until(arguments: list[str], folder: str, victim: int, step: int, saved: list[str]) -> None:
    """Run the command; the `victim` dies in a step, once these checkpoints are there. Runs in each process."""
    compute = command._gradients

    def die_in_step(run, batches):
        if run.step + 1 == step and int(os.environ["RANK"]) == victim:
            while saved and saved != [path.name for path in Checkpoints(run.options.save_to).all()]:
                time.sleep(0.01)
            ranks.die()
        return compute(run, batches)

    command._gradients = die_in_step
    main(arguments, folder)


def saving(folder, name, batch, *words):
    save = ["--steps", str(STEPS), "--save-every", "2", "--save-to", f"{name}-saved", "--batch", str(batch)]
    return options(folder, folder / f"{name}.jsonl", *save, *words)


def killed(port, folder, words, size, victim, step, *saved):
    """Run the command until a process is killed."""
    call = {"arguments": words, "folder": str(folder), "victim": victim, "step": step, "saved": saved}
    ended = ranks.wait(restarts.start(port, size, main_until, call))
    ranks.check_ended(ended, [-signal.SIGKILL if rank == victim else 2 for rank in range(size)])


def finished(port, folder, words, size, code=0):
    """Run the command to the end; return what it prints."""
    ended = ranks.wait(restarts.start(port, size, main, {"arguments": words, "folder": str(folder)}))
    ranks.check_ended(ended, [code] * size)
    return "".join(result.text for result in ended)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_restarted_run_goes_on_by_itself(tmp_path, victim):
    with agent_store() as port:
        words = saving(tmp_path, "killed", 2)
        killed(port, tmp_path, words, 2, victim, 2)  # before the first checkpoint
        killed(port, tmp_path, words, 2, victim, 4, "step-2")
        text = finished(port, tmp_path, words, 2)
        assert text.count("resumed from killed-saved/step-2") == 1
        # A process may also be lost after the last step.
        assert "step-6 was saved after the last step: nothing is left to do" in finished(port, tmp_path, words, 2)
    whole = saving(tmp_path, "whole", 2)
    train(tmp_path, whole, 2)  # without torchrun, which resumes no checkpoints of another launch
    with agent_store() as port:
        assert "has checkpoints of an earlier run (step-6)" in finished(port, tmp_path, whole, 2, code=2)
    assert losses(tmp_path / "killed.jsonl") == losses(tmp_path / "whole.jsonl")
    assert json.loads((tmp_path / "killed.jsonl").read_text().splitlines()[-1])["kind"] == "summary"


@pytest.mark.slow
def test_a_restarted_run_goes_on_with_fewer_processes(tmp_path):
    with agent_store() as port:
        killed(port, tmp_path, saving(tmp_path, "killed", 1), 4, 3, 6, "step-2", "step-4")
        text = finished(port, tmp_path, saving(tmp_path, "killed", 1), 2)
        assert text.count("resumed from killed-saved/step-4") == 1
    # Without torchrun, by which the second command would go on from the last checkpoint of the first.
    train(tmp_path, saving(tmp_path, "planned", 1), 4)
    text = train(tmp_path, saving(tmp_path, "planned", 1, "--resume", "planned-saved/step-4"), 2)
    assert text.count("resumed from planned-saved/step-4") == 1
    assert [step for step, *_ in losses(tmp_path / "killed.jsonl")] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "killed.jsonl")[4:] == losses(tmp_path / "planned.jsonl")[4:]


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_its_own_checkpoints(tmp_path):
    with agent_store() as port:
        finished(port, tmp_path, saving(tmp_path, "run", 2, "--steps", "2"), 2)
        words = saving(tmp_path, "run", 2, "--resume", "run-saved/step-2", "--keep", "1")
        killed(port, tmp_path, words, 2, 1, 6, "step-4")
        assert not (tmp_path / "run-saved" / "step-2").exists()
        assert "resumed from run-saved/step-4" in finished(port, tmp_path, words, 2)
    assert [step for step, *_ in losses(tmp_path / "run.jsonl")] == list(range(1, STEPS + 1))
