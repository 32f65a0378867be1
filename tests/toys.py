"""Small models, inputs for them, and the training loop that most tests share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar.functional import linear_cross_entropy

VOCABULARY = 11


def layers(width: int, count: int, *after: Callable[[], nn.Module], bias: bool = True) -> nn.Sequential:
    """Build equal linear layers, each followed by one module of every class or function in `after`."""

    def layer() -> nn.Module:
        linear = nn.Linear(width, width, bias=bias)
        return nn.Sequential(linear, *(build() for build in after)) if after else linear

    return nn.Sequential(*(layer() for _ in range(count)))


@dataclass(frozen=True)
class Shape:
    """Description of a language model."""

    blocks: tuple[str, ...]
    """Kind of each block: "mlp", "attention" or "plain"."""
    tied: bool = False
    frozen_norms: bool = False
    checkpointing: bool = False
    width: int = 8
    tiled: bool = False
    """The result is the cross-entropy of the next tokens, without logits, in place of the logits' mean square."""

    def build(self) -> nn.Module:
        """Build the model, initialised from the current seed."""
        return LanguageModel(self)


def _block(kind: str, width: int) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
    if kind == "attention":
        return nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())


class LanguageModel(nn.Module):
    """Embedding, blocks and a head, which may be tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(_block(kind, shape.width) for kind in shape.blocks)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        if shape.tied:
            self.head.weight = self.words.weight
        if shape.frozen_norms:
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the head's output, or a tiled loss."""
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.shape.checkpointing else block(hidden)
        if self.shape.tiled:
            return linear_cross_entropy(hidden, self.head.weight, ids, shift=True)
        return mean_square(self.head(hidden))


class Made(nn.Module):
    """Module with named parts, whose forward is a function of it and its inputs; `calls` counts them."""

    def __init__(self, function: Callable[..., Any], parts: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.function, self.calls = function, 0
        for name, build in parts.items():
            setattr(self, name, build())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        self.calls += 1
        return self.function(self, *args, **kwargs)


def module(function: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], Made]:
    """Return a function that builds such a module from functions that build its parts."""
    return lambda: Made(function, parts)


def batches(count: int, length: int = 5) -> list[tuple[torch.Tensor]]:
    """Return batches of token ids for language models, the same in each call."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randint(0, VOCABULARY, (2, length), generator=generator),) for _ in range(count)]


def inputs(count: int, width: int, rows: int = 3, seed: int = 5) -> list[tuple[torch.Tensor]]:
    """Return batches of random vectors on the host for `layers`, the same in each call."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return [(torch.randn(rows, width, generator=generator, device="cpu"),) for _ in range(count)]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """Return the mean square as the loss."""
    return output.float().pow(2).mean()


def update(trainer: Any, loss: torch.Tensor, **options: Any) -> torch.Tensor:
    """Run one backward and one step, and wait for nothing; return a copy of the loss."""
    trainer.backward(loss, **options)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach().clone()


def train(
    trainer: Any,
    data: Iterable[Sequence[Any]],
    *,
    accumulation: int = 1,
    max_norm: float | None = None,
    update: bool = False,
    reduce_once: bool = False,
) -> list[torch.Tensor]:
    """Train an engine or a reference trainer.

    Args:
        trainer: Engine or reference trainer of a model that returns a loss, or a tensor whose mean square is the loss.
        data: Batches of positional arguments.
        accumulation: Batches per optimizer step; the last step may have fewer.
        max_norm: Maximum global gradient norm. Default None: no clipping.
        update: Update parameters in the last backward of each step.
        reduce_once: Reduce gradients over processes only in the last backward of each step.

    Returns:
        Copies of the losses and of the norms on the host.
    """
    results, data = [], list(data)
    for number, batch in enumerate(data, start=1):
        last = number % accumulation == 0 or number == len(data)
        output = trainer(*batch)
        loss = output if output.dim() == 0 else mean_square(output)
        trainer.backward(loss / accumulation, update=update and last, accumulate=reduce_once and not last)
        if last:
            if max_norm is not None:
                results.append(trainer.clip_grad_norm_(max_norm).to("cpu", copy=True))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        results.append(loss.detach().to("cpu", copy=True))
    return results


def outcome(trainer: Any) -> list[torch.Tensor]:
    """Return the parameters, buffers and optimizer states that are tensors, on the host."""
    states = trainer.optimizer.state_dict()["state"]
    values = [*trainer.state_dict().values(), *(value for state in states.values() for value in state.values())]
    return [value.detach().cpu() for value in values if isinstance(value, torch.Tensor)]
