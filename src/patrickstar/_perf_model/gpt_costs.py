"""Analytic costs of a GPT: parameters, floating-point operations and activation bytes."""

from dataclasses import dataclass

from patrickstar._perf_model.experts import Experts, FeedForward
from patrickstar._perf_model.transformer_shape import HALF, Checkpointing, TransformerShape

SAVED_BYTES_PER_HIDDEN = 34
"""Bytes that one layer saves for backward per token and hidden unit, without attention scores (Korthikanti et al. 2022,
equation 1)."""
DIVIDED_SAVED_BYTES = 24
"""Those of the 34 bytes that tensor parallelism divides (equation 2)."""
GELU_SAVED_BYTES = 4
"""Bytes that a token saves per unit of the feed-forward network: input and output of GELU."""


@dataclass(frozen=True)
class Gpt(TransformerShape):
    """Transformer of equal layers: attention, then a feed-forward network four times as wide.

    `head`: compute logits with the tied embedding weight; a classifier has no such head.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    sequence: int = 1024
    head: bool = True
    experts: Experts | None = None

    @property
    def described_layers(self) -> str:
        return f"{self.layers} layers"

    @property
    def layer_numel(self) -> int:
        """Number of parameters of one layer: matrices, biases and norms."""
        return self.layer_part(1)

    def layer_part(self, tp: int) -> int:
        return (12 * self.hidden**2 + 7 * self.hidden) // tp + 6 * self.hidden

    @property
    def feed_forward(self) -> FeedForward:
        return FeedForward(self.hidden, 4 * self.hidden, biases=True, saved_bytes_per_unit=GELU_SAVED_BYTES)

    @property
    def expert_layers(self) -> int:
        return self.layers // self.experts.every if self.experts is not None else 0

    def dense_numel(self, tp: int = 1) -> int:
        vocab = -(-self.vocab // tp)
        return (
            self.layers * self.layer_part(tp)
            + self.expert_layers * (self.router_numel - self.feed_forward.numel(tp))
            + (vocab + self.sequence) * self.hidden
            + 2 * self.hidden
        )

    def all_reduces(self, recompute: bool, exchanged: bool = False) -> float:
        # Attention and feed-forward network sum their outputs in forward and the gradients of their inputs in backward;
        # the embedding sums its outputs, the head the gradients of its inputs.
        sums = 2 * self.layers - (self.expert_layers / 2 if exchanged else 0)
        return (3 if recompute else 2) * sums + 1 + self.head

    def layer_operations(self, tokens: int) -> int:
        return tokens * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    def checkpoint_bytes(self, batch: int) -> int:
        """Return the bytes of the 16-bit checkpointed inputs of all layers."""
        return self.layers * batch * self.sequence * self.hidden * HALF

    def product_bytes(self, batch: int, tp: int = 1) -> float:
        """Return the bytes that products and attention of a layer without experts return."""
        return HALF * batch * self.sequence * self.hidden * ((3 + 1 + 4) / tp + 2)

    def activation_bytes(self, batch: int, checkpointing: Checkpointing, tp: int = 1, expert_bytes: float = 0) -> float:
        unit = batch * self.sequence * self.hidden
        layer = unit * (SAVED_BYTES_PER_HIDDEN - DIVIDED_SAVED_BYTES + DIVIDED_SAVED_BYTES / tp)
        instead = expert_bytes - batch * self.sequence * self.feed_forward.saved_bytes(tp)
        if checkpointing:
            stored = (self.layers - 1) * self.product_bytes(batch, tp) if checkpointing == "products" else 0
            return self.checkpoint_bytes(batch) + stored + layer + (max(0.0, instead) if self.expert_layers else 0)
        return self.layers * layer + self.expert_layers * instead
