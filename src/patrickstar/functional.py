"""Loss functions that use less memory than those of PyTorch."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

from patrickstar._hardware.compute_device import autocast_dtype, autocast_to
from patrickstar.errors import ModelError

__all__ = ["linear_cross_entropy"]

# [Note: tiled loss]
# With a vocabulary of 128,256 words the logits of 8,192 tokens are 2 GB in bf16 and 4 GB in fp32, and as much again for
# their gradients. But each token's loss depends on its own logits alone. So tokens are divided into tiles: a tile's
# logits are computed, then turned in place into their gradients, and these multiplied with `weight` and with `hidden`,
# before the next tile's are computed. The gradients are ready at the end of forward, whose only other result is a
# number; backward multiplies them by the gradient of that number. No product is computed twice.
#
# Order of additions. `weight.grad` is the sum over tiles, the first one first, each added by one product with
# accumulation, which rounds to the dtype of the sum: that of `weight`. In fp16 the sum is in fp32, because there the
# factor 1 / tokens, which would round most gradients to zero, is applied in backward, and a sum without it may leave
# fp16's range. Token losses are added by one `sum` in fp32. Tiles depend on shape and dtype alone, so the bits do too.
#
# Difference to `cross_entropy` of all logits in fp32: a token's loss is computed by the same operators. Products of a
# tile may round otherwise than those of all tokens, each tile after the first rounds the sum of `weight.grad` once
# more, and the sum of token losses has another order.

TILE_BYTES = 192 * 2**20
"""Bytes of a tile's widest tensor, such as its logits, in the dtype of the products."""
ROW_ALIGNMENT = 128
"""Tokens of a tile are a multiple of this, as matrix units want it."""
BLOCK_BYTES = 16 * 2**20
"""Bytes of a tile's rows that are in fp32 at a time: what the last cache of a CPU or GPU holds, and enough for an
operator on a GPU to take longer than its launch."""


def tile_rows(width: int, itemsize: int) -> int:
    """Return the number of tokens of a tile.

    Args:
        width: Elements of a token in the widest tensor.
        itemsize: Bytes of an element.
    """
    return max(TILE_BYTES // (width * itemsize) // ROW_ALIGNMENT, 1) * ROW_ALIGNMENT


@dataclass(frozen=True)
class _LossForm:
    """Options of a loss: what is computed from the logits of a token."""

    label_smoothing: float
    z_loss: float
    scale: float
    softcap: float | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    shift: bool = False,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    denominator: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of `functional.linear(hidden, weight, bias)` against labels, without all its logits.

    Forward computes the gradients too, tile by tile of tokens, so that it needs memory for the logits of one tile (0.4
    GB at most) beside `hidden`, `weight` and their gradients. Its value is that of `functional.cross_entropy` of the
    logits in fp32, up to rounding. See [Note: tiled loss].

    Args:
        hidden: Input of the last layer, of shape (..., features); fp32, bf16, fp16 or fp64.
        weight: Weight of the last layer, of shape (vocabulary, features); it may be tied to an embedding.
        labels: Index of the right word for each token, of shape (...), int64; `ignore_index` for tokens without one.
        bias: Bias of the last layer, of shape (vocabulary,). Default None.
        shift: A token's label is that of the next one in the last dimension of `labels`, as for causal language models.
            Default False.
        ignore_index: Label of tokens that do not count. Default -100.
        reduction: "mean" (default) divides the sum by the number of tokens that count; "sum" does not.
        denominator: Divides the sum in place of that number, such as the number of tokens in all micro-batches of a
            step. Default None.
        label_smoothing: Part of the target that is spread evenly over the vocabulary. Default 0.0.
        z_loss: Factor of the squared logarithm of the softmax's denominator, which is added (PaLM). Default 0.0.
        scale: Factor of the logits (Cohere, Granite). Default 1.0.
        softcap: Replaces each logit x, once scaled, by softcap * tanh(x / softcap) (Gemma 2). Default None.

    Returns:
        The loss: a tensor without dimensions, in fp32 (fp64 for inputs in fp64). Its backward may run once.

    Raises:
        ModelError: Shapes or dtypes do not fit together, or `weight` is a DTensor.
    """
    if (dtype := autocast_dtype(hidden.device)) is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    _check(hidden, weight, labels, bias)
    if reduction not in ("mean", "sum"):
        raise ModelError(f"linear_cross_entropy: reduction={reduction!r} is neither 'mean' nor 'sum'")
    if shift:
        labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    labels, tokens = labels.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    counts = labels != ignore_index
    if denominator is None and reduction == "mean":
        denominator = counts.sum()
    form = _LossForm(label_smoothing, z_loss, scale, softcap)
    wanted = torch.is_grad_enabled()  # which it is not within `apply`
    with autocast_to(hidden.device, None):
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            tokens, weight, bias, labels, counts, denominator, form, wanted
        )
    return loss


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Raise ModelError if the arguments do not fit together."""
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if isinstance(weight, DTensor) or isinstance(hidden, DTensor):
        raise ModelError(
            "linear_cross_entropy: weight or hidden is a DTensor, and a tile needs logits of the whole vocabulary: use "
            "functional.cross_entropy of the logits"
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ModelError(f"linear_cross_entropy: the last dimensions of hidden and weight differ: {shapes}")
    if labels.shape != hidden.shape[:-1]:
        raise ModelError(f"linear_cross_entropy: labels need the shape of hidden without its last dimension: {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"linear_cross_entropy: bias has shape {tuple(bias.shape)}, not one number per word: {shapes}")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ModelError(
            f"linear_cross_entropy: hidden is {hidden.dtype} and weight {weight.dtype}: convert hidden, or use "
            f"torch.autocast"
        )
    if labels.dtype != torch.int64:
        raise ModelError(f"linear_cross_entropy: labels are {labels.dtype}, not torch.int64: use labels.long()")


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of a linear layer, whose forward computes the gradients. See [Note: tiled loss]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counts: Tensor,
        denominator: Tensor | float | None,
        form: _LossForm,
        wanted: bool,
    ) -> Tensor:
        needs = [wanted and needed for needed in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        vocabulary, size = weight.shape[0], tile_rows(weight.shape[0], hidden.element_size())
        late = hidden.dtype is torch.float16
        sum_dtype = wide if late else weight.dtype
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=sum_dtype, device=hidden.device) if needs[1] else None
        grad_bias = torch.zeros(vocabulary, dtype=wide, device=hidden.device) if needs[2] else None
        losses = torch.zeros(len(labels), dtype=wide, device=hidden.device)
        # Each token's factor in the gradient: zero for those that do not count.
        factors = (
            counts.to(wide)
            if late or denominator is None
            else counts / torch.as_tensor(denominator, dtype=wide, device=hidden.device)
        )
        block = max(BLOCK_BYTES // (vocabulary * wide.itemsize), 1)
        for begin in range(0, len(labels), size):
            tile = slice(begin, begin + size)
            logits = functional.linear(hidden[tile], weight, bias)
            for first in range(0, len(logits), block):
                rows = slice(begin + first, min(begin + first + block, begin + len(logits)))
                part = logits[first : first + block]
                losses[rows] = _rows(part, labels[rows], counts[rows], factors[rows], form, any(needs))
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[tile])
            if grad_weight is not None and late:
                grad_weight += logits.t() @ hidden[tile]
            elif grad_weight is not None:
                grad_weight.addmm_(logits.t(), hidden[tile], beta=float(begin > 0))
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
        loss = losses.sum()
        if denominator is not None:
            loss = loss / denominator
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype)
        ctx.denominator = denominator if late else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise ModelError(
                "linear_cross_entropy: backward runs a second time, and the first has used the gradients that forward "
                "computed: call linear_cross_entropy again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad_loss if ctx.denominator is None else grad_loss / ctx.denominator
        results = [
            None if grad is None else grad.mul_(factor).to(dtype)
            for grad, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*results, None, None, None, None, None)


def _rows(
    logits: Tensor, labels: Tensor, counts: Tensor, factors: Tensor, form: _LossForm, with_gradients: bool
) -> Tensor:
    """Return the losses of some tokens, and replace their logits by the gradients of the loss.

    Args:
        logits: Of shape (tokens, vocabulary), in the dtype of the products.
        labels: Words, of shape (tokens,).
        counts: True for tokens that count.
        factors: Factor of each token's gradient, in fp32.
        form: What is computed.
        with_gradients: Write gradients.

    Returns:
        The losses, of shape (tokens,), in fp32; 0 for tokens that do not count.
    """
    wide, smoothing, even = factors.dtype, form.label_smoothing, form.label_smoothing / logits.shape[1]
    words, factors = labels.masked_fill(~counts, 0).unsqueeze(1), factors.unsqueeze(1)
    values, slope = logits, None
    if form.scale != 1.0 or form.softcap is not None:
        values = logits.to(wide, copy=True).mul_(form.scale)
    if form.softcap is not None:
        values.div_(form.softcap).tanh_()
        slope = 1 - values.square() if with_gradients else None
        values.mul_(form.softcap)
    logarithms = functional.log_softmax(values, 1, dtype=wide)
    chosen = logarithms.gather(1, words)
    losses, summed = -chosen, factors
    if smoothing:
        losses = (smoothing - 1) * chosen - even * logarithms.sum(1, keepdim=True)
    if form.z_loss:
        log_sums = values.gather(1, words).to(wide) - chosen
        losses += form.z_loss * log_sums.square()
        summed = factors * (1 + 2 * form.z_loss * log_sums)
    if with_gradients:
        gradients = logarithms.exp_().mul_(summed)
        if smoothing:
            gradients -= factors * even
        gradients.scatter_add_(1, words, factors * (smoothing - 1) if smoothing else -factors)
        if slope is not None:
            gradients *= slope
        logits.copy_(gradients if form.scale == 1.0 else gradients.mul_(form.scale))
    return losses.squeeze(1).masked_fill_(~counts, 0.0)
