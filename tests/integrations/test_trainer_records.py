"""Recorded training with the Trainer: its log, its event files for TensorBoard, and its progress bar."""

import re

import pytest
from event_files import FIELDS, expected_scalars, scalars_in
from transformers import ProgressCallback, TrainerCallback

from patrickstar._report.run_file import read_run

from .trainers import Stressed, close, create, trained

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
