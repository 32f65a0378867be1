"""Progress bar of a Trainer whose steps are recorded: memory of each tier, and waits."""

import re

from transformers import ProgressCallback, TrainerCallback

from .trainers import BUDGET, Stressed, arguments, close, gpt2, texts


def test_the_bar_shows_memory_and_waits(tmp_path):
    class Reader(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            bars = [each.training_bar for each in handler.callbacks if isinstance(each, ProgressCallback)]
            shown.extend(bar.postfix for bar in bars)

    shown = []
    trainer = Stressed(
        gpt2(), arguments(tmp_path, max_steps=3, disable_tqdm=False), train_dataset=texts(), config=BUDGET
    )
    trainer.record(tmp_path / "log.jsonl")
    trainer.add_callback(Reader())  # behind the recording's
    handler = trainer.callback_handler
    trainer.train()
    size = r"\d[\d.]* [KMG]?i?B"
    assert len(shown) == 3
    assert all(re.fullmatch(rf"device {size} \+ {size} of {size}, host {size}, waiting \d+%", text) for text in shown)
    close(trainer)
