"""Analytic costs of a T5: parameters, floating-point operations and activation bytes."""

from dataclasses import dataclass

from patrickstar._perf_model.experts import Experts, FeedForward
from patrickstar._perf_model.transformer_shape import HALF, Checkpointing, TransformerShape

POSITION_BUCKETS = 32
"""Relative positions that have a bias of their own per head and stack (Raffel et al. 2020, section 2.1)."""

SAVED_BY_ATTENTION, SAVED_BY_NORM, SAVED_BY_FFN = 11, 2, 3
SAVED_BY_RELU = 2
"""Bytes that parts of a layer save for backward, without attention scores (Korthikanti et al. 2022, section 4.1). Per
token and hidden unit: attention 11, a norm 2, input and dropout mask of a feed-forward network 3. Per token and unit of
the feed-forward network: 2 for the output of ReLU, which is also the input of the second matrix product."""
DIVIDED_BY_ATTENTION = 8
"""Those of the 11 bytes that tensor parallelism divides: query, key, value, and the input of the output matrix."""


@dataclass(frozen=True)
class T5(TransformerShape):
    """Encoder and decoder of equally many layers, with cross attention and the embedding weight tied to the head.

    Attributes:
        layers: Number of layers of each stack.
        hidden: Width; all heads together are as wide.
        ffn: Width of the feed-forward network, which has ReLU and two matrices.
        sequence: Number of tokens of each stack: a sample has this many input and as many output tokens.
        experts: In both stacks, some layers have experts in place of the feed-forward network.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int = 32128
    sequence: int = 1024
    experts: Experts | None = None

    @property
    def described_layers(self) -> str:
        return f"{self.layers} encoder and {self.layers} decoder layers"

    def layer_part(self, tp: int) -> int:
        # A decoder layer has two attentions and three norms, without biases; an encoder layer one and two.
        return 8 * self.hidden**2 // tp + self.feed_forward.numel(tp) + 3 * self.hidden

    @property
    def feed_forward(self) -> FeedForward:
        return FeedForward(self.hidden, self.ffn, biases=False, saved_bytes_per_unit=SAVED_BY_RELU)

    @property
    def expert_layers(self) -> int:
        return 2 * (self.layers // self.experts.every) if self.experts is not None else 0

    def dense_numel(self, tp: int = 1) -> int:
        encoder_layer = self.layer_part(tp) - 4 * self.hidden**2 // tp - self.hidden
        return (
            self.layers * (encoder_layer + self.layer_part(tp))
            + self.expert_layers * (self.router_numel - self.feed_forward.numel(tp))
            + -(-self.vocab // tp) * self.hidden
            + 2 * POSITION_BUCKETS * self.heads // tp
            + 2 * self.hidden
        )

    def all_reduces(self, recompute: bool, exchanged: bool = False) -> float:
        # Forward sums the outputs of three attentions and two feed-forward networks per pair of layers, and those of
        # the embedding in both stacks. Backward sums the gradients of their inputs, six per pair because cross
        # attention has two inputs, and those of the head's input. The unit is a token of one stack.
        halves = self.expert_layers / 2 if exchanged else 0
        forward, backward = 5 * self.layers - halves, 6 * self.layers - halves
        return (2 if recompute else 1) * forward + backward + 3

    def layer_operations(self, tokens: int) -> int:
        # An encoder and a decoder layer together have three attentions and two feed-forward networks.
        attention = 8 * self.hidden**2 + 4 * self.sequence * self.hidden
        return tokens * (3 * attention + 2 * 4 * self.hidden * self.ffn)

    def checkpoint_bytes(self, batch: int) -> int:
        """Return the bytes of the 16-bit checkpointed inputs of all layers, and of the encoder's output."""
        return (2 * self.layers + 1) * batch * self.sequence * self.hidden * HALF

    def saved_bytes(self, batch: int, tp: int = 1) -> tuple[float, float]:
        """Return the bytes that an encoder layer and a decoder layer save for backward, without attention scores."""
        tokens = batch * self.sequence
        ffn = tokens * (SAVED_BY_FFN * self.hidden + self.feed_forward.saved_bytes(tp))
        divided = DIVIDED_BY_ATTENTION * (1 - 1 / tp)
        attention = tokens * self.hidden * (SAVED_BY_ATTENTION - divided + SAVED_BY_NORM)
        norm = tokens * self.hidden * SAVED_BY_NORM
        return attention + ffn + norm, 2 * attention + ffn + norm

    def product_bytes(self, batch: int, tp: int = 1) -> float:
        """Return the bytes that products and attention of an encoder and a decoder layer without experts return."""
        attention, network = 4 / tp * self.hidden + self.hidden, self.ffn / tp + self.hidden
        return HALF * batch * self.sequence * (3 * attention + 2 * network)

    def activation_bytes(self, batch: int, checkpointing: Checkpointing, tp: int = 1, expert_bytes: float = 0) -> float:
        encoder, decoder = self.saved_bytes(batch, tp)
        instead = expert_bytes - batch * self.sequence * self.feed_forward.saved_bytes(tp)
        if checkpointing:
            stored = (self.layers - 1) * self.product_bytes(batch, tp) if checkpointing == "products" else 0
            return self.checkpoint_bytes(batch) + stored + decoder + (max(0.0, instead) if self.expert_layers else 0)
        return self.layers * (encoder + decoder) + self.expert_layers * instead
