"""Compare the loss of a language model by tiles of tokens with the loss of all logits: time, memory, gradients.

python benchmarks/tiled_loss.py [--tokens 1024] [--vocabulary 128256] [--features 1024] [--rounds 3]

Forward and backward of both alternate in one process on the same tensors. The bound is the time of the three products
at the rate that one of them reaches alone. Memory is the growth of resident memory over operands and gradients, each in
a process of its own.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from fresh_processes import apart, growth
from report import options, publish
from steps import alternating, ratio_cells, seconds_of
from torch import Tensor
from torch.nn import functional

import patrickstar as ps
from patrickstar._layout.byte_size import format_size

Sizes = tuple[int, int, int]
"""Tokens, vocabulary, features."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def operands(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden, weight and labels."""
    tokens, vocabulary, features = sizes
    torch.manual_seed(0)
    hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, features) / features**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


def all_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss as models of transformers compute it."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def gradients(loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of hidden and weight."""
    return torch.autograd.grad(loss_of(hidden, weight, labels), (hidden, weight))


LOSSES: dict[str, Callable[..., Tensor]] = {"tiled": ps.functional.linear_cross_entropy, "all logits": all_logits}


def extra_bytes(name: str, sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the growth of resident memory by a loss and its backward, without that of the gradients."""
    small = operands((sizes[0], 128, sizes[2]), dtype)
    gradients(LOSSES[name], *small)  # what libraries initialize
    given = operands(sizes, dtype)
    _, peak = growth(partial(gradients, LOSSES[name], *given))
    return peak - given[0].nbytes - given[1].nbytes


def row(precision: str, sizes: Sizes, rounds: int) -> dict[str, str]:
    """Return a row of the table."""
    dtype = DTYPES[precision]
    memory = {name: apart(extra_bytes, name, sizes, dtype) for name in LOSSES}
    hidden, weight, labels = operands(sizes, dtype)
    with torch.no_grad():
        product = partial(functional.linear, hidden, weight)
        product()
        bound_s = 3 * min(seconds_of(product) for _ in range(rounds))
    actions = {name: partial(gradients, loss_of, hidden, weight, labels) for name, loss_of in LOSSES.items()}
    seconds = alternating(actions, rounds)
    tiled, whole = (gradients(loss_of, hidden, weight, labels) for loss_of in LOSSES.values())
    errors = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(tiled, whole, strict=True)]
    return {
        "precision": precision,
        "tiled": f"{median(seconds['tiled']):.2f} s",
        "all logits": f"{median(seconds['all logits']):.2f} s",
        "bound": f"{bound_s:.2f} s",
        **ratio_cells(seconds["tiled"], seconds["all logits"]),
        "memory tiled": format_size(memory["tiled"]),
        "memory of all logits": format_size(memory["all logits"]),
        "difference of gradients (hidden, weight)": f"{errors[0]:.1e}, {errors[1]:.1e}",
    }


def main() -> None:
    given = options(__doc__, tokens=1024, vocabulary=128_256, features=1024, rounds=3)
    sizes = given.tokens, given.vocabulary, given.features
    publish(
        "tiled_loss",
        f"Forward and backward of the loss of {given.tokens:,} tokens, {given.vocabulary:,} words and "
        f"{given.features:,} features: `ps.functional.linear_cross_entropy` against `cross_entropy` of all logits in "
        f"fp32. Times are medians of {given.rounds} rounds by turns; the limit of the ratio is 1. The bound is the "
        f"time of three products. Memory is the growth of resident memory beside operands and gradients.",
        [row(precision, sizes, given.rounds) for precision in DTYPES],
    )


if __name__ == "__main__":
    main()
