"""`patrickstar train` after a restart by torchrun: it resumes by itself, and its log is that of one run."""

import json
import os
import signal
import time

import pytest

import patrickstar as ps
from patrickstar._cli import train as command

from . import ranks
from .restarts import agent_store, start
from .test_cli import losses, main, options, train

STEPS = 6


def main_until(arguments: list[str], folder: str, victim: int, step: int, saved: list[str]) -> None:
    """Run the command; the `victim` dies in a step, once these checkpoints are there. Runs in each process."""
    run_step = command._step

    def die_in_step(given, engine, batches, number):
        if number == step and int(os.environ["RANK"]) == victim:
            while saved and saved != [path.name for path in ps.Checkpoints(given.save_to).all()]:
                time.sleep(0.01)
            ranks.die()
        return run_step(given, engine, batches, number)

    command._step = die_in_step
    main(arguments, folder)


def arguments(folder, name, batch, *words):
    save = ["--steps", str(STEPS), "--save-every", "2", "--save-to", f"{name}-saved", "--batch", str(batch)]
    return options(folder, folder / f"{name}.jsonl", *save, *words)


def killed(port, folder, words, size, victim, step, *saved):
    """Run the command until a process is killed."""
    call = {"arguments": words, "folder": str(folder), "victim": victim, "step": step, "saved": saved}
    ended = ranks.wait(start(port, size, main_until, call))
    ranks.check_ended(ended, [-signal.SIGKILL if rank == victim else 2 for rank in range(size)])


def finished(port, folder, words, size, code=0):
    """Run the command to the end; return what it prints."""
    ended = ranks.wait(start(port, size, main, {"arguments": words, "folder": str(folder)}))
    ranks.check_ended(ended, [code] * size)
    return "".join(result.text for result in ended)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_restarted_run_goes_on_by_itself(tmp_path, victim):
    with agent_store() as port:
        words = arguments(tmp_path, "killed", 2)
        killed(port, tmp_path, words, 2, victim, 2)  # before the first checkpoint
        killed(port, tmp_path, words, 2, victim, 4, "step-2")
        text = finished(port, tmp_path, words, 2)
        assert text.count("resumed from killed-saved/step-2") == 1
        # A process may also be lost after the last step.
        assert "step-6 was saved after the last step: nothing is left to do" in finished(port, tmp_path, words, 2)
    whole = arguments(tmp_path, "whole", 2)
    train(tmp_path, whole, 2)  # without torchrun, which resumes no checkpoints of another launch
    with agent_store() as port:
        assert "has checkpoints of an earlier run (step-6)" in finished(port, tmp_path, whole, 2, code=2)
    assert losses(tmp_path / "killed.jsonl") == losses(tmp_path / "whole.jsonl")
    assert json.loads((tmp_path / "killed.jsonl").read_text().splitlines()[-1])["kind"] == "summary"


@pytest.mark.slow
def test_a_restarted_run_goes_on_with_fewer_processes(tmp_path):
    with agent_store() as port:
        killed(port, tmp_path, arguments(tmp_path, "killed", 1), 4, 3, 6, "step-2", "step-4")
        text = finished(port, tmp_path, arguments(tmp_path, "killed", 1), 2)
        assert text.count("resumed from killed-saved/step-4") == 1
    # Without torchrun, by which the second command would go on from the last checkpoint of the first.
    train(tmp_path, arguments(tmp_path, "planned", 1), 4)
    text = train(tmp_path, arguments(tmp_path, "planned", 1, "--resume", "planned-saved/step-4"), 2)
    assert text.count("resumed from planned-saved/step-4") == 1
    assert [step for step, *_ in losses(tmp_path / "killed.jsonl")] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "killed.jsonl")[4:] == losses(tmp_path / "planned.jsonl")[4:]


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_its_own_checkpoints(tmp_path):
    with agent_store() as port:
        finished(port, tmp_path, arguments(tmp_path, "run", 2, "--steps", "2"), 2)
        words = arguments(tmp_path, "run", 2, "--resume", "run-saved/step-2", "--keep", "1")
        killed(port, tmp_path, words, 2, 1, 6, "step-4")
        assert not (tmp_path / "run-saved" / "step-2").exists()
        assert "resumed from run-saved/step-4" in finished(port, tmp_path, words, 2)
    assert [step for step, *_ in losses(tmp_path / "run.jsonl")] == list(range(1, STEPS + 1))
