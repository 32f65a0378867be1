"""`torchrun -m patrickstar train --tp --ep --replicas`: meshes train as plain data parallelism does."""

from itertools import chain

import pytest
import torch
import transformers
from integrations import tiny

from patrickstar._cli import train as command

from . import ranks
from .test_cli import check_near, losses, main, options, records, train, train_forked

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
    run_step = command._step

    def step(options, engine, batches, number):
        ids = next(batches)
        print(f"batch {torch.initial_seed()} {hash(tuple(ids.flatten().tolist()))}")
        return run_step(options, engine, chain([ids], batches), number)

    command._step = step
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
