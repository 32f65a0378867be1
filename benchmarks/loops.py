"""Measure the overhead of a library's training loop on the engine against the engine's own loop.

python benchmarks/loops.py [--loops trainer accelerate lightning trl] [--device cpu] [--model gpt-40m] [--batch 1]
    [--sequence 512] [--rounds 31]
Two engines of one model alternate in one process: each step of the library's loop is followed by a step of the
engine's. A step of the library's is timed from the end of the engine's to its own end, with data loading and logging.
Both clip gradients and step a learning-rate schedule, and their losses must be bit-identical. In TRL's SFTTrainer both
models compute its loss, entropy and accuracy of tokens (`add_fused_lm_head`).
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning
import torch
from datasets import Dataset
from report import options, publish
from steps import gpt, ratio_cells, tokens
from tokenizers import Tokenizer, models
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments
from trl import SFTConfig
from trl.trainer.sft_trainer import add_fused_lm_head

import patrickstar as ps
from patrickstar.integrations.accelerate import Accelerator
from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.transformers import Trainer
from patrickstar.integrations.trl import SFTTrainer

WARM_UP = 4
PAD = "<pad>"
Batch = dict[str, torch.Tensor]


def build(name: str, fused: bool = False) -> PreTrainedModel:
    """Build the model of both loops. They share one random generator; no preset has dropout."""
    torch.manual_seed(0)
    model = gpt(name)
    if fused:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean over the tokens that are predicted."""
    loss: torch.Tensor = model(**batch, num_items_in_batch=batch["labels"][:, 1:].numel()).loss
    return loss


class Loop(TrainerCallback):
    """The engine's own loop, a step of which follows each step of the library's; `fused`: with TRL's loss."""

    def __init__(self, options: argparse.Namespace, groups: Any = None, fused: bool = False) -> None:
        config = ps.Config(device=options.device, optimizer=ps.AdamW(lr=1e-4, param_groups=groups))
        self.engine, self.optimizer = ps.initialize(build(options.model, fused), config)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1.0)
        self.fused = fused
        self.batches: list[Batch] = []  # of the steps, for trainers with callbacks
        self.pairs: list[tuple[float, float]] = []
        self.losses: list[float] = []
        self.start = time.perf_counter()

    def loss(self, batch: Batch) -> torch.Tensor:
        if not self.fused:
            return loss_of(self.engine, batch)
        outputs = self.engine(**batch, use_cache=False, fused_lm_head=True)
        loss: torch.Tensor = -outputs.log_probs.sum() / batch["labels"][:, 1:].numel()
        return loss

    def follow(self, batch: Batch) -> float:
        """Train a step, and note the seconds of the library's step and of this one; return the loss."""
        step_end = time.perf_counter()
        loss = self.loss(batch)
        self.engine.backward(loss)
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        now = time.perf_counter()
        self.pairs.append((step_end - self.start, now - step_end))
        self.start = now
        return self.losses[-1]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.follow(self.batches[state.global_step - 1])


def examples(options: argparse.Namespace) -> list[Batch]:
    ids = tokens(options.model, (WARM_UP + options.rounds) * options.batch, options.sequence)
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the training arguments of a step that is compared with the loop's."""
    return dict(
        use_cpu=options.device == "cpu",
        bf16=True,
        per_device_train_batch_size=options.batch,
        max_steps=WARM_UP + options.rounds,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(trainer: Trainer, batches: list[Batch], options: argparse.Namespace, fused: bool = False) -> Loop:
    """Train both, and check that their losses are the same bits."""
    trainer.create_optimizer()
    loop = Loop(options, trainer._param_groups, fused)
    loop.batches = batches
    trainer.add_callback(loop)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == loop.losses, f"losses differ: {logged} and {loop.losses}"
    trainer.engine.close(keep=False)
    return loop


def run_trainer(options: argparse.Namespace) -> Loop:
    data = examples(options)
    batches = list(DataLoader(data, options.batch))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(build(options.model), TrainingArguments(folder, **arguments(options)), train_dataset=data)
        return train(trainer, batches, options)


def run_trl(options: argparse.Namespace) -> Loop:
    ids = [example["input_ids"].clamp(min=1).tolist() for example in examples(options)]
    words = Tokenizer(models.WordLevel({PAD: 0}, unk_token=PAD))
    changes = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            build(options.model),
            SFTConfig(folder, **changes, **arguments(options)),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=PAD),
        )
        rows = [{"input_ids": row} for row in ids]
        batches = list(DataLoader(rows, options.batch, collate_fn=trainer.data_collator))
        return train(trainer, batches, options, fused=True)


def run_accelerate(options: argparse.Namespace) -> Loop:
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="bf16")
    model = build(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(examples(options), batch_size=options.batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    loop = Loop(options)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert loss.item() == loop.follow(batch), "losses differ"
    accelerator.free_memory()
    return loop


class LightningModel(lightning.LightningModule):
    """The model of the loop, followed by the loop's step."""

    def __init__(self, name: str, loop: Loop) -> None:
        super().__init__()
        self.model, self.loop = build(name), loop

    def training_step(self, batch: Batch, number: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Batch, number: int) -> None:
        assert outputs["loss"].item() == self.loop.follow(batch), "losses differ"


def run_lightning(options: argparse.Namespace) -> Loop:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loop = Loop(options)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        strategy=PatrickStarStrategy({"device": options.device}),
        accelerator="cpu" if options.device == "cpu" else "gpu",
        devices=1,
        precision="bf16-true",
        max_steps=WARM_UP + options.rounds,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        **dict.fromkeys(off, False),
    )
    trainer.fit(LightningModel(options.model, loop), DataLoader(examples(options), batch_size=options.batch))
    return loop


LOGGED = "clipping, a log entry per step"
LOOPS: dict[str, tuple[str, str, str, Callable[[argparse.Namespace], Loop]]] = {
    "trainer": ("trainer", "the Trainer", LOGGED, run_trainer),
    "accelerate": ("accelerate_loop", "accelerate's loop", "clipping", run_accelerate),
    "lightning": ("lightning_loop", "Lightning", LOGGED, run_lightning),
    "trl": ("trl_loop", "the SFTTrainer", LOGGED, run_trl),
}
"""Name of the results, name of the library's loop, and what both loops do beside a step."""


def compare(given: argparse.Namespace, name: str, label: str, extras: str, run: Callable[..., Loop]) -> None:
    """Publish the overhead of a library's loop over the engine's own."""
    loop = run(given)
    loop.engine.close(keep=False)
    assert len(loop.pairs) == WARM_UP + given.rounds
    library, own = zip(*loop.pairs[WARM_UP:], strict=True)
    row = {
        "model": given.model,
        "loop, s/step": f"{median(own):.4f}",
        f"{label}, s/step": f"{median(library):.4f}",
        "overhead, ms (median of pairs)": f"{1e3 * median(map(float.__sub__, library, own)):.1f}",
    }
    publish(
        name,
        f"bf16, {given.batch} x {given.sequence} tokens per step, everything fits, {extras}. Limit: a step of {label} "
        f"takes at most 1.03 times a step of the engine's own loop. The losses of both are bit-identical.",
        [row | ratio_cells(library, own)],
        device=given.device,
    )


def main() -> None:
    shape = {"device": "cpu", "model": "gpt-40m", "batch": 1, "sequence": 512, "rounds": 31}
    given = options(__doc__, loops=list(LOOPS), **shape)
    for name in given.loops:
        compare(given, *LOOPS[name])


if __name__ == "__main__":
    main()
