"""Measure the overhead of Lightning's Trainer on the engine against the engine's own loop.

python benchmarks/lightning_loop.py [--device cpu] [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 31]
Two engines of one model alternate in one process: each Lightning step is followed by a step of the loop. A Lightning
step is timed from the end of the loop's step to its own end, with data loading and logging. Both clip gradients and
step a learning-rate schedule, and their losses must be bit-identical.
"""

import argparse
import logging
import time
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from trainer import WARM_UP, Loop, build, compare

from patrickstar._models.presets import PRESETS
from patrickstar.integrations.lightning import PatrickStarStrategy


class LanguageModel(lightning.LightningModule):
    """The model of the loop."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = build(name)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, num_items_in_batch=batch["labels"][:, 1:].numel()).loss
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AlternatingSteps(lightning.Callback):
    """Callback that runs one step of the loop after each Lightning step."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.pairs: list[tuple[float, float]] = []

    def on_train_start(self, *args: Any) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        """Step the loop with the same batch."""
        value, step_end = module.losses[-1].item(), time.perf_counter()
        assert value == self.loop.step(batch), "losses differ"
        now = time.perf_counter()
        self.pairs.append((step_end - self.start, now - step_end))
        self.start = now


def run(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of a step of Lightning and of the engine's loop, in pairs."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    steps = WARM_UP + options.rounds
    vocabulary = PRESETS[options.model].config().vocab_size
    ids = torch.randint(0, vocabulary, (steps * options.batch, options.sequence))
    examples = [{"input_ids": row, "labels": row} for row in ids]
    alternating = AlternatingSteps(Loop(options, None))
    trainer = lightning.Trainer(
        strategy=PatrickStarStrategy({"device": options.device}),
        accelerator="cpu" if options.device == "cpu" else "gpu",
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[alternating],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(LanguageModel(options.model), DataLoader(examples, batch_size=options.batch))
    alternating.loop.engine.close(keep=False)
    assert len(alternating.pairs) == steps
    return alternating.pairs


if __name__ == "__main__":
    compare("lightning_loop", "Lightning", __doc__, "clipping, a log entry per step", run)
