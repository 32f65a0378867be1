"""An interrupted and resumed run is bitwise equal to an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from patrickstar.errors import CheckpointError, ModelError, TrainingError
from patrickstar.testing import assert_same_bits

from .trainers import ADAMW, Stressed, close, create, logged, texts, weights

STEPS = 6


class StopAfter(TrainerCallback):
    """Callback that ends a run early, like a job scheduler."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


class Killed(Stressed):
    """Trainer that is killed while it writes its second checkpoint."""

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(folder, kind=Stressed, stop=None, **options):
    defaults = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, max_grad_norm=0.5)
    defaults |= dict(eval_dataset=texts(7, seed=1), callbacks=[] if stop is None else [StopAfter(stop)])
    return create(kind, folder, **{"bf16": True} | defaults | options)


def result(one):
    """Return log, parameters and optimizer states of a run."""
    moments = {
        f"{position}.{key}": value
        for position, state in one.engine.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    return [entry for entry in logged(one) if "train_loss" not in entry], weights(one) | moments


def finish_the_same(whole, second):
    """Assert that both runs have the same log, parameters and states, and close them."""
    (log, state), (own_log, own_state) = result(whole), result(second)
    assert log == own_log
    assert_same_bits(state, own_state, "parameters and states")
    close(whole)
    close(second)


@pytest.mark.parametrize(("step", "epochs"), [(2, 2), pytest.param(3, 2, marks=pytest.mark.slow), (4, 1.7)])
def test_resumed_run_is_bitwise_equal(tmp_path, step, epochs):
    """Resume within an epoch of 3 steps (2, 4) and at its end; accumulation, dropout, scheduler, evaluation."""
    whole = trainer(tmp_path / "whole", save_steps=1, num_train_epochs=epochs)
    whole.train()
    first = trainer(tmp_path / "parts", save_steps=1, num_train_epochs=epochs, stop=step)
    first.train()
    assert get_last_checkpoint(tmp_path / "parts") == str(tmp_path / "parts" / f"checkpoint-{step}")
    close(first)
    torch.manual_seed(step)
    second = trainer(tmp_path / "parts", save_steps=1, num_train_epochs=epochs)
    second.train(resume_from_checkpoint=True)
    finish_the_same(whole, second)


def test_resume_from_a_path_after_evaluation(tmp_path):
    """The engine exists before the checkpoint is loaded."""
    whole = trainer(tmp_path)
    whole.train()
    second = trainer(tmp_path)
    second.evaluate()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    finish_the_same(whole, second)


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    """The incomplete checkpoint is ignored, and the run resumes from the last complete one."""
    tests = Path(__file__).parents[1]
    command = f"from integrations.test_trainer_resume import run_and_die; run_and_die({str(tmp_path / 'parts')!r})"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests)}
    ended = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, timeout=600)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    left = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert left == ["checkpoint-2", "partial-checkpoint-4"]
    assert get_last_checkpoint(tmp_path / "parts") == str(tmp_path / "parts" / "checkpoint-2")
    second = trainer(tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path / "whole")
    whole.train()
    finish_the_same(whole, second)
    assert not list((tmp_path / "parts").glob("partial-*"))


def run_and_die(folder):
    torch.set_num_threads(1)
    trainer(folder, kind=Killed).train()


def test_contents_of_a_checkpoint(tmp_path):
    """Weights that transformers loads, the engine's state, and the Trainer's files; no pickled optimizer."""
    one = trainer(tmp_path, save_total_limit=2, load_best_model_at_end=True, eval_steps=1, save_steps=1)
    losses = []

    class StepRecorder(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            losses.append((metrics["eval_loss"], state.global_step, weights(one)))

    one.add_callback(StepRecorder())
    one.train()
    best, step, state = min(losses, key=lambda each: each[0])
    assert one.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{step}")
    assert_same_bits(state, weights(one), "the best model")
    assert one.evaluate()["eval_loss"] == best
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {f"checkpoint-{STEPS}", f"checkpoint-{step}" if step < STEPS else f"checkpoint-{STEPS - 1}"}
    folder = tmp_path / f"checkpoint-{step}"
    assert {path.name for path in folder.iterdir()} >= {
        *("model.safetensors", "config.json", "patrickstar", "trainer_state.json", "scheduler.pt", "rng_state.pth"),
        "training_args.bin",
    }
    assert not (folder / "optimizer.pt").exists()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step
    assert_same_bits(state, GPT2LMHeadModel.from_pretrained(folder).state_dict(), "loaded by transformers")


def test_checkpoint_without_optimizer(tmp_path):
    """Resuming restores weights and the step, like the stock Trainer."""
    found = []
    for kind in (transformers.Trainer, Stressed):
        folder, options = tmp_path / kind.__name__, dict(max_grad_norm=100.0, save_only_model=True)
        options |= dict(save_strategy="steps", save_steps=2, optimizer_cls_and_kwargs=ADAMW)
        create(kind, folder, **options).train()
        second = create(kind, folder, **options)
        second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        found.append(weights(second))
        close(second)
    assert_same_bits(*found, "parameters")


def test_resume_errors(tmp_path):
    create(transformers.Trainer, tmp_path / "stock", save_strategy="steps", save_steps=1, max_steps=1).train()
    one = trainer(tmp_path / "one")
    with pytest.raises(TrainingError, match="pickle"):
        one.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-1"))
    with pytest.raises(ValueError, match="No valid checkpoint"):
        one.train(resume_from_checkpoint=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors"):
        one.train(resume_from_checkpoint=str(tmp_path / "empty"))
    one.args.max_steps = 2
    one.train()
    close(one)
    other = trainer(tmp_path / "one", optim="sgd")
    with pytest.raises(CheckpointError, match="use the same optimizer"):
        other.train(resume_from_checkpoint=True)
