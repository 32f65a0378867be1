"""Measure the overhead of transformers' Trainer: the Trainer on the engine against the engine's own loop.

python benchmarks/trainer.py [--device cpu] [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 31]
Two engines of one model alternate in one process: each Trainer step is followed by a step of the loop. A Trainer step
is timed from the end of the loop's step to its own end, including data loading and logging. Both clip gradients and
step a learning-rate schedule, and their losses must be bit-identical.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from report import publish
from transformers import GPT2LMHeadModel, PreTrainedModel, TrainerCallback, TrainingArguments

import patrickstar as ps
from patrickstar._models.presets import PRESETS
from patrickstar.integrations.transformers import Trainer

WARM_UP = 4


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = PRESETS[name].config()
    config.use_cache = False
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, dropout, 0.0)  # both engines share one random generator
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


class Loop:
    """Training loop on the engine over batches in memory."""

    def __init__(self, options: argparse.Namespace, groups: Any) -> None:
        optimizer = ps.AdamW(lr=1e-4, param_groups=groups)
        self.engine, self.optimizer = ps.initialize(
            self.build(options.model), ps.Config(device=options.device, optimizer=optimizer)
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def build(self, name: str) -> PreTrainedModel:
        return build(name)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch, num_items_in_batch=batch["labels"][:, 1:].numel()).loss
        return loss

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self.loss(batch)
        self.engine.backward(loss)
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()


class AlternatingSteps(TrainerCallback):
    """Callback that runs one step of the loop after each Trainer step."""

    def __init__(self, loop: Loop, batches: list[dict[str, torch.Tensor]]) -> None:
        self.loop = loop
        self.batches = batches
        self.pairs: list[tuple[float, float]] = []
        self.losses: list[float] = []
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step_end = time.perf_counter()
        self.losses.append(self.loop.step(self.batches[state.global_step - 1]))
        now = time.perf_counter()
        self.pairs.append((step_end - self.start, now - step_end))
        self.start = now


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


def train(trainer: Trainer, alternating: AlternatingSteps) -> list[tuple[float, float]]:
    """Train both, check that their losses are the same bits, and return the seconds of their steps, in pairs."""
    trainer.add_callback(alternating)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == alternating.losses, f"losses differ: {logged} and {alternating.losses}"
    for engine in (trainer.engine, alternating.loop.engine):
        engine.close(keep=False)
    return alternating.pairs


def run(options: argparse.Namespace) -> list[tuple[float, float]]:
    steps = WARM_UP + options.rounds
    vocabulary = PRESETS[options.model].config().vocab_size
    examples = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(0, vocabulary, (steps * options.batch, options.sequence))
    ]
    batches = [
        {name: torch.stack([example[name] for example in examples[i : i + options.batch]]) for name in examples[0]}
        for i in range(0, len(examples), options.batch)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(build(options.model), TrainingArguments(folder, **arguments(options)), train_dataset=examples)
        trainer.create_optimizer()
        return train(trainer, AlternatingSteps(Loop(options, trainer._param_groups), batches))


def compare(
    name: str, label: str, doc: str | None, extras: str, run: Callable[[argparse.Namespace], list[tuple[float, float]]]
) -> None:
    """Publish the overhead of a library's loop over the engine's own.

    Args:
        name: Name of the results.
        label: Name of the library's loop.
        doc: Description of the command.
        extras: What both loops do beside a step.
        run: Function that returns the seconds of a step of the library's loop and of the engine's, in pairs.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="gpt-40m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    pairs = run(options)[WARM_UP:]
    ratios = sorted(library / loop for library, loop in pairs)
    row = [
        options.model,
        f"{median(loop for _, loop in pairs):.4f}",
        f"{median(library for library, _ in pairs):.4f}",
        f"{1e3 * median(library - loop for library, loop in pairs):.1f}",
        f"{median(ratios):.3f}",
        f"{ratios[0]:.3f} - {ratios[-1]:.3f}",
    ]
    publish(
        name,
        options.device,
        f"bf16, {options.batch} x {options.sequence} tokens per step, everything fits, {extras}. Limit: a step of "
        f"{label} takes at most 1.03 times a step of the engine's own loop. The losses of both are bit-identical.",
        [
            "model",
            "loop, s/step",
            f"{label}, s/step",
            "overhead, ms (median of pairs)",
            "ratio (median of pairs)",
            "range",
        ],
        [row],
    )


if __name__ == "__main__":
    compare("trainer", "the Trainer", __doc__, "clipping, a log entry per step", run)
