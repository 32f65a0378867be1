"""Models, steps and timings that benchmarks share."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from patrickstar._models.presets import PRESETS, Preset


def gpt(preset: str | Preset, checkpointing: bool = False, **changes: Any) -> GPT2LMHeadModel:
    """Build the model of a preset in training mode. `changes`: other values of its configuration."""
    config = (PRESETS[preset] if isinstance(preset, str) else preset).config()
    for name, value in ({"use_cache": False} | changes).items():
        setattr(config, name, value)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # the library's own default, set here because it would warn
    return checkpointed(model) if checkpointing else model


def checkpointed(model: Any) -> Any:
    """Enable activation checkpointing of a model; return it."""
    # Renamed in transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def tokens(preset: str, batch: int, sequence: int, seed: int | None = None) -> torch.Tensor:
    """Return random token ids of a preset's vocabulary."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(0, PRESETS[preset].config().vocab_size, (batch, sequence), generator=generator)


def train_step(trainer: Any, ids: torch.Tensor, *, max_norm: float | None = None, **backward: Any) -> torch.Tensor:
    """Train a language model of an engine or of a reference trainer for a step; return the loss.

    Args:
        trainer: It has an `optimizer`.
        ids: Tokens.
        max_norm: Limit of the gradients' norm; None: they are not clipped.
        backward: Options of `backward`.
    """
    loss: torch.Tensor = trainer(input_ids=ids, labels=ids).loss
    trainer.backward(loss, **backward)
    if max_norm is not None:
        trainer.clip_grad_norm_(max_norm)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss


class Plain:
    """A model in plain PyTorch, with the interface of an engine."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def __call__(self, **batch: torch.Tensor) -> Any:
        return self.model(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def seconds_of(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that an action takes."""
    start_s = clock()
    action()
    return clock() - start_s


def in_threads(work: Iterable[Callable[[], object]]) -> None:
    """Run functions at the same time, each in a thread, to their ends."""
    threads = [threading.Thread(target=function) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def alternating(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run actions by turns, and return the seconds of each, without those of the first rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(warm_up + rounds):
        for name, action in actions.items():
            seconds[name].append(seconds_of(action, clock))
    return {name: values[warm_up:] for name, values in seconds.items()}


def ratio_of(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median over pairs of first / second."""
    return median(a / b for a, b in zip(first, second, strict=True))


def ratio_cells(first: Sequence[float], second: Sequence[float]) -> dict[str, str]:
    """Return cells with the median over pairs of first / second, and the range."""
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    return {"ratio (median of pairs)": f"{median(ratios):.3f}", "range": f"{ratios[0]:.3f} - {ratios[-1]:.3f}"}
