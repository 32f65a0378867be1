"""Runs of the Trainer: one that is interrupted and resumed is bitwise equal to one that is not.

Optimizers that the Trainer chooses by its arguments, and those that it refuses. Arguments of frameworks that name no
precision leave it to the configuration, which chooses by default. A recorded training: its log, its event files for
TensorBoard, and its progress bar.
"""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import rates
import torch
import transformers
from accelerate.state import AcceleratorState
from event_files import FIELDS, expected_scalars, scalars_in
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, ProgressCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import patrickstar as ps
from patrickstar._report.run_file import read_run
from patrickstar.errors import CheckpointError, ConfigError, ModelError, TrainingError
from patrickstar.integrations.accelerate import Accelerator
from patrickstar.integrations.transformers import Trainer
from patrickstar.integrations.transformers._training_args import merge

from .trainers import ADAMW, Stressed, arguments, close, create, gpt2, logged, texts, trained, weights

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
    ps.testing.assert_same_bits(state, own_state, "parameters and states")
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
    command = f"from integrations.test_trainer_runs import run_and_die; run_and_die({str(tmp_path / 'parts')!r})"
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
    ps.testing.assert_same_bits(state, weights(one), "the best model")
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
    ps.testing.assert_same_bits(state, GPT2LMHeadModel.from_pretrained(folder).state_dict(), "loaded by transformers")


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
    ps.testing.assert_same_bits(*found, "parameters")


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


# Optimizers


def test_choice_of_the_optimizer(tmp_path):
    def chosen(config=None, **options):
        trainer = create(Trainer, tmp_path, config=config, **options)
        trainer.create_optimizer()
        close(trainer)
        return trainer.engine.config.optimizer

    default = chosen(learning_rate=3e-4, adam_beta1=0.8)
    assert isinstance(default, ps.AdamW) and default.lr == 3e-4 and default.betas == (0.8, 0.999)
    sgd = chosen(optim="sgd", optim_args="momentum=0.9")
    assert isinstance(sgd, ps.SGD) and sgd.momentum == 0.9
    assert chosen(optim="rmsprop").kind is torch.optim.RMSprop
    assert isinstance(chosen(optimizer_cls_and_kwargs=(ps.Lion, {"lr": 1e-4})), ps.Lion)
    assert chosen(optimizers=(partial(torch.optim.Adam, lr=1e-3), None)).kind is torch.optim.Adam
    lion = chosen(optim="lion_32bit", learning_rate=3e-4, adam_beta1=0.8)
    assert isinstance(lion, ps.Lion) and lion.lr == 3e-4 and lion.betas == (0.8, 0.999)
    paged = chosen(optim="paged_adamw_32bit", learning_rate=3e-4)
    assert isinstance(paged, ps.AdamW) and paged.lr == 3e-4
    assert chosen(optim="adafactor", learning_rate=3e-4).options["lr"] == 3e-4
    free = chosen(optim="schedule_free_adamw", learning_rate=3e-4, adam_beta1=0.8, optim_args="r=1, weight_lr_power=1")
    assert isinstance(free, ps.ScheduleFreeAdamW) and (free.lr, free.betas) == (3e-4, (0.8, 0.999))
    assert (free.r, free.weight_lr_power) == (1.0, 1.0)
    muon = chosen(optimizers=(partial(torch.optim.Muon, lr=1e-3, momentum=0.9), None))
    assert isinstance(muon, ps.Muon) and muon.momentum == 0.9
    muon = chosen(optimizer_cls_and_kwargs=(torch.optim.Muon, {"lr": 1e-3}))
    assert isinstance(muon, ps.Muon) and muon.lr == 1e-3
    own = ps.Lion(lr=1e-5)
    assert chosen(config=ps.Config(optimizer=own)) == own
    assert chosen(config=ps.Config(chunk_size="16KiB"), optim="adagrad").kind is torch.optim.Adagrad


def test_unsupported_optimizers_are_rejected(tmp_path):
    model = gpt2()
    args = arguments(tmp_path)
    made = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(made)
    with pytest.raises(ConfigError, match=r"give the class, not an optimizer"):
        Trainer(model, args, optimizers=(made, None)).create_optimizer()
    with pytest.raises(ConfigError, match=r"scheduler can't be passed"):
        Trainer(model, args, optimizers=(None, schedule))
    for name, reason in [
        ("lion_8bit", r"optim='lion_8bit' is not supported: it stores states in 8 bits"),
        ("paged_lion_8bit", r"it stores states in 8 bits, .* Use optim='adamw_8bit'"),
        ("rmsprop_bnb", r"RMSprop of bitsandbytes updates tensors with kernels of its own"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            Trainer(model, arguments(tmp_path, optim=name)).create_optimizer()

    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

    trainer = Own(model, args, train_dataset=texts())
    with pytest.raises(ConfigError, match=r"not in create_optimizer"):
        trainer.train()


def test_schedule_free_training_evaluates_and_saves_the_average(tmp_path):
    """The Trainer calls `eval` and `train` of the optimizer; a resumed run has the bits of one that went on."""

    def made(folder, **options):
        own = dict(optim="schedule_free_adamw", lr_scheduler_type="constant", max_grad_norm=100.0)
        own |= dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=4)
        return create(Stressed, folder, eval_dataset=texts(7, seed=1), **own | options)

    trainer = made(tmp_path / "whole")
    trainer.train()
    expected, log = trainer.engine.state_dict(), logged(trainer)
    with trainer.engine.averaged():
        average = trainer.engine.state_dict()
    last = tmp_path / "whole" / "checkpoint-4"
    saved = load_file(last / "model.safetensors")
    close(trainer)
    apart = {name: (average[name] - value).abs().max().item() for name, value in saved.items()}
    assert max(apart.values()) < 1e-6, "the saved weights are the average, up to rounding of its conversion"
    assert any((expected[name] - value).abs().max().item() > 1e-4 for name, value in saved.items())
    trainer = made(tmp_path / "whole", output_dir=str(tmp_path / "resumed"))
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    ps.testing.assert_same_bits(expected, trainer.engine.state_dict(), "parameters of the resumed run")
    evaluations = [[entry for entry in each if "eval_loss" in entry] for each in (log, logged(trainer))]
    assert evaluations[0] == evaluations[1]


# Precision


@pytest.mark.parametrize(
    ("flags", "config", "precision"),
    [
        ({}, {}, "auto"),
        ({}, {"precision": "fp32"}, "fp32"),
        ({}, {"precision": "bf16"}, "bf16"),
        ({"bf16": True}, {}, "bf16"),
        ({"bf16": True}, {"precision": "auto"}, "bf16"),
    ],
)
def test_arguments_of_a_trainer(tmp_path, flags, config, precision):
    assert merge(ps.Config(**config), arguments(tmp_path, **flags), ps.AdamW()).precision == precision


def test_a_resumed_trainer_keeps_the_precision_of_its_checkpoint(tmp_path, monkeypatch):
    options = dict(save_strategy="steps", save_steps=1, num_train_epochs=1, train_dataset=texts(8), config=None)
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=2e9))
    first = create(Trainer, tmp_path, max_steps=1, **options)
    first.train()
    assert first.engine.config.precision == "bf16"

    def never(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(rates.MEASURED, never)
    resumed = create(Trainer, tmp_path, max_steps=2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.config.precision == "bf16"


@pytest.mark.parametrize(("bf16", "named"), [(2e9, "bf16"), (0.1e9, "no")])
def test_an_accelerator_knows_its_precision_before_there_is_a_model(monkeypatch, bf16, named):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=bf16))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as `accelerate launch` sets it unless it is asked
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == named
    accelerator.prepare(gpt2(), ps.AdamW())
    assert accelerator.engine.config.precision == {"bf16": "bf16", "no": "fp32"}[named]
    assert "precision" not in accelerator.engine.config.model_fields_set
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


# Records

TAGS = {tag for tag in FIELDS if tag.partition("/")[0] not in ("disk", "collectives", "staleness")}


def test_a_recorded_training_has_the_same_losses(tmp_path):
    """A log of steps and timelines, which a resumed training continues, and a recording that ends by an error."""
    found = []
    for log in (None, tmp_path / "log.jsonl"):
        one = create(Stressed, tmp_path / f"{log is None}", max_steps=5)
        if log is not None:
            one.record(log)
        found.append([entry["loss"] for entry in trained(one)[0] if "loss" in entry])
    run = read_run(tmp_path / "log.jsonl")
    assert found[0] == found[1] == [step["loss"] for step in run.steps] and len(found[0]) == 5
    assert [timeline.step for timeline in run.timelines] == [1, 2, 4]
    assert all(step["learning_rate"] >= 0 and step["gradient_norm"] > 0 for step in run.steps)

    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if not again.failed:
                again.failed = True
                raise RuntimeError("in the middle")

    again = create(Stressed, tmp_path, max_steps=2, callbacks=[Broken()])
    again.failed = False
    again.record(tmp_path / "again.jsonl")
    with pytest.raises(RuntimeError, match="in the middle"):
        again.train()
    again.train()
    assert [step["step"] for step in read_run(tmp_path / "again.jsonl").steps] == [1, 2]


def test_events_are_the_values_of_the_log(tmp_path):
    """A resumed training continues them."""
    for steps, checkpoint in ((4, None), (6, str(tmp_path / "checkpoint-2"))):
        trainer = create(Stressed, tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        trainer.record(tmp_path / "log.jsonl", tensorboard=tmp_path / "events")
        trainer.train(resume_from_checkpoint=checkpoint)
        close(trainer)
        run, found = read_run(tmp_path / "log.jsonl"), scalars_in(tmp_path / "events")
        assert found == expected_scalars(run, TAGS)
        assert sorted(found["train/loss"]) == list(range(1, steps + 1))


def test_the_bar_shows_memory_and_waits(tmp_path):
    class Reader(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            bars = [each.training_bar for each in handler.callbacks if isinstance(each, ProgressCallback)]
            shown.extend(bar.postfix for bar in bars)

    shown = []
    trainer = create(Stressed, tmp_path, max_steps=3, disable_tqdm=False)
    trainer.record(tmp_path / "log.jsonl")
    trainer.add_callback(Reader())  # behind the recording's
    handler = trainer.callback_handler
    trainer.train()
    size = r"\d[\d.]* [KMG]?i?B"
    assert len(shown) == 3
    assert all(re.fullmatch(rf"device {size} and {size} of {size}, host {size}, waiting \d+%", text) for text in shown)
