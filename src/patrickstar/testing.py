"""Exactness checks for your model: a plain PyTorch reference, and assertions that the engine is bit-identical to it."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar._dry_run.precision_choice import settle_precision
from patrickstar._engine.engine import Engine
from patrickstar._lock_free_reference import LockFreeOptimizer
from patrickstar._reference import PlainOptimizer, ReferenceOptimizer, ReferenceTrainer
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION, Fragmentation
from patrickstar.config import Config

__all__ = [
    "LockFreeOptimizer",
    "NoMeter",
    "PlainOptimizer",
    "ReferenceOptimizer",
    "ReferenceTrainer",
    "Script",
    "assert_exact",
    "assert_same_bits",
    "compare",
    "stressed",
]

Script = Callable[[Any, Any], Sequence[torch.Tensor]]
"""Training loop that both trainers run: takes a trainer and its optimizer, returns tensors to compare."""


class NoMeter:
    """Meter that reports no non-model data, so that tests of tiny models do not depend on their process."""

    source = "nothing"
    counts_freed = False

    def calibrate(self, chunk_bytes: int) -> None:
        """Ignore `chunk_bytes`: there is no baseline."""

    def now(self, chunk_bytes: int) -> int:
        """Return 0 bytes, whatever `chunk_bytes` are."""
        return 0

    def peak(self, chunk_bytes: int) -> int:
        """Return 0 bytes, whatever `chunk_bytes` are."""
        return 0

    def restart(self) -> None:
        """Do nothing: there is no peak."""

    def reclaim(self) -> None:
        """Do nothing: no freed memory is cached."""

    def set_aside(self, budget_bytes: int) -> Fragmentation:
        """Return no fragmentation, whatever `budget_bytes` are."""
        return NO_FRAGMENTATION

    def limit(self, nbytes: int) -> None:
        """Ignore `nbytes`: nothing is cached."""

    def close(self) -> None:
        """Do nothing: there is no limit."""


def stressed(model: nn.Module | Callable[[], nn.Module], config: Config) -> Engine:
    """Create an engine that evicts every evictable chunk at each access, and fills freed memory with NaN.

    Args:
        model: Model, or function that builds it.
        config: Configuration.

    Returns:
        The engine.
    """
    return Engine(model, config, meter=NoMeter(), evict_everything=True, poison=True)


def compare(
    model_func: Callable[[], nn.Module], config: Config, script: Script, *, stress: bool = True, seed: int = 0
) -> None:
    """Run a training loop with the reference and with the engine, and assert that the results are bit-identical.

    Compares the tensors that the script returns, the final parameters and buffers, and the optimizer states.

    Args:
        model_func: Function that builds the model; called twice.
        config: Configuration.
        script: Training loop; called with a trainer and its optimizer.
        stress: Evict every evictable chunk at each access.
        seed: Seed of `torch.manual_seed` before each run.

    Raises:
        AssertionError: A tensor, named in the message, differs.
    """
    config = settle_precision(config, model_func, config.find_device())  # once: both need the same
    torch.manual_seed(seed)
    reference = ReferenceTrainer(model_func, config)
    expected = script(reference, reference.optimizer)
    torch.manual_seed(seed)
    engine = stressed(model_func, config) if stress else Engine(model_func, config, meter=NoMeter(), poison=True)
    try:
        found = script(engine, engine.optimizer)
        assert_same_bits(list(expected), list(found), "tensors returned by the script")
        assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters and buffers")
        _assert_same_states(reference.optimizer.state_dict(), engine.optimizer.state_dict())
    finally:
        engine.close()


def assert_exact(
    model_func: Callable[[], nn.Module],
    batches: Iterable[Mapping[str, Any] | Sequence[Any]],
    config: Config,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    max_norm: float | None = None,
    accumulation: int = 1,
    scheduler: Callable[[Any], Any] | None = None,
    stress: bool = True,
    seed: int = 0,
) -> None:
    """Assert that training a model with the engine is bit-identical to training it in plain PyTorch.

    Args:
        model_func: Function that builds the model; called twice, from the same seed.
        batches: Dictionaries of keyword arguments, or tuples of positional arguments, of the model.
        config: Configuration.
        loss_fn: Function of output and batch that returns the scalar loss. Default: `output.loss`; if the output is a
            tensor, its mean square.
        max_norm: Maximum global gradient norm. Default None: no clipping.
        accumulation: Batches per optimizer step.
        scheduler: Function that builds a learning-rate scheduler for an optimizer; stepped after each optimizer step.
        stress: Evict every evictable chunk at each access. Freed memory is filled with NaN in any case.
        seed: Seed of `torch.manual_seed` before each run.

    Raises:
        AssertionError: A tensor, named in the message, differs.
    """
    batches = list(batches)
    loss_of = loss_fn if loss_fn is not None else _default_loss

    def script(trainer: Any, optimizer: Any) -> list[torch.Tensor]:
        schedule = scheduler(getattr(optimizer, "inner", optimizer)) if scheduler is not None else None
        results = []
        for number, batch in enumerate(batches, start=1):
            out = trainer(**batch) if isinstance(batch, Mapping) else trainer(*batch)
            loss = loss_of(out, batch)
            trainer.backward(loss / accumulation)
            results.append(loss.detach().clone())
            if number % accumulation and number < len(batches):
                continue
            if max_norm is not None:
                results.append(trainer.clip_grad_norm_(max_norm).clone())
            for name, param in trainer.module.named_parameters():
                if max_norm is None and param.requires_grad and (grad := trainer.gradient(name)) is not None:
                    results.append(grad)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        return results

    compare(model_func, config, script, stress=stress, seed=seed)
    # Both trainers are in cycles: until they are collected, their tensors count as non-model data of other engines.
    gc.collect()


def assert_same_bits(expected: Any, found: Any, what: str) -> None:
    """Assert that two collections of tensors are bit-identical; NaNs are equal if their bits are.

    Args:
        expected: Dictionary or sequence of tensors; other values, such as step counts, have to be equal.
        found: Collection to compare, with the same keys or length.
        what: Label of the collection in error messages.

    Raises:
        AssertionError: Lengths, dtypes, shapes or bits differ.
    """
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
    assert len(expected) == len(found), f"{what}: {len(expected)} tensors expected, {len(found)} found"
    for key, tensor in pairs:
        other = found[key]
        if not isinstance(tensor, torch.Tensor):
            assert tensor == other, f"{what}: {key} is {other!r}, not {tensor!r}"
            continue
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, (
            f"{what}: {key} is {other.dtype} {tuple(other.shape)}, not {tensor.dtype} {tuple(tensor.shape)}"
        )
        same = _bits(tensor) == _bits(other)
        assert same.all(), f"{what}: {key} differs in {int((~same).sum())} bytes of {same.numel()}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.Tensor.clone(tensor.detach()).cpu().contiguous().reshape(-1)
    return flat if flat.dtype == torch.bool else flat.view(torch.uint8)


def _assert_same_states(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected["state"].keys() == found["state"].keys(), (
        f"parameters with optimizer states: {sorted(expected['state'])} expected, {sorted(found['state'])} found"
    )
    for position, state in expected["state"].items():
        assert_same_bits(state, found["state"][position], f"optimizer states of parameter {position}")


def _default_loss(out: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = out.float().pow(2).mean() if isinstance(out, torch.Tensor) else out.loss
    return loss
