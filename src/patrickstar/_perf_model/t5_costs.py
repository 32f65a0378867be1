"""Analytic costs of a T5: parameters, floating-point operations and activation bytes."""

from dataclasses import dataclass

from patrickstar._perf_model.gpt_costs import HALF, SINGLE

POSITION_BUCKETS = 32
"""Relative positions that have a bias of their own per head and stack (Raffel et al. 2020, section 2.1)."""

SAVED_BY_ATTENTION, SAVED_BY_NORM, SAVED_BY_FFN = 11, 2, 3
SAVED_BY_RELU = 2
"""Bytes that parts of a layer save for backward, without attention scores (Korthikanti et al. 2022, section 4.1). Per
token and hidden unit: attention 11, a norm 2, input and dropout mask of a feed-forward network 3. Per token and unit of
the feed-forward network: 2 for the output of ReLU, which is also the input of the second matrix product."""


@dataclass(frozen=True)
class T5:
    """Encoder and decoder of equally many layers, with cross attention and the embedding weight tied to the head.

    Attributes:
        layers: Number of layers of each stack.
        hidden: Width; all heads together are as wide.
        ffn: Width of the feed-forward network, which has ReLU and two matrices.
        sequence: Number of tokens of each stack: a sample has this many input and as many output tokens.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int = 32128
    sequence: int = 1024

    @property
    def encoder_layer_numel(self) -> int:
        """Number of parameters of one encoder layer: self-attention, feed-forward network and two norms, no biases."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def decoder_layer_numel(self) -> int:
        """Number of parameters of one decoder layer, which has cross attention and its norm in addition."""
        return self.encoder_layer_numel + 4 * self.hidden**2 + self.hidden

    @property
    def embedding_numel(self) -> int:
        """Number of embedding parameters: tokens, and the biases of relative positions of both stacks."""
        return self.vocab * self.hidden + 2 * POSITION_BUCKETS * self.heads

    @property
    def numel(self) -> int:
        """Number of all parameters, including the final norms of both stacks."""
        layers = self.layers * (self.encoder_layer_numel + self.decoder_layer_numel)
        return layers + self.embedding_numel + 2 * self.hidden

    def layer_operations(self, tokens: int) -> int:
        """Return the forward operations of one encoder and one decoder layer for `tokens` tokens in each stack.

        Together they have three attentions and two feed-forward networks. Masked scores and weighted sums count.
        """
        attention = 8 * self.hidden**2 + 4 * self.sequence * self.hidden
        return tokens * (3 * attention + 2 * 4 * self.hidden * self.ffn)

    def logit_operations(self, tokens: int) -> int:
        """Return the forward operations of the head, which only the decoder has."""
        return 2 * tokens * self.vocab * self.hidden

    def operations(self, tokens: int, recompute: bool = True) -> int:
        """Return the operations of a step: a backward costs two forwards, recomputation one more per layer."""
        layers = self.layers * self.layer_operations(tokens)
        return (4 if recompute else 3) * layers + 3 * self.logit_operations(tokens)

    def checkpoint_bytes(self, batch: int) -> int:
        """Return the bytes of the 16-bit checkpointed inputs of all layers, and of the encoder's output."""
        return (2 * self.layers + 1) * batch * self.sequence * self.hidden * HALF

    def saved_bytes(self, batch: int) -> tuple[int, int]:
        """Return the bytes that an encoder layer and a decoder layer save for backward, without attention scores."""
        tokens = batch * self.sequence
        ffn = tokens * (SAVED_BY_FFN * self.hidden + SAVED_BY_RELU * self.ffn)
        attention = tokens * self.hidden * (SAVED_BY_ATTENTION + SAVED_BY_NORM)
        norm = tokens * self.hidden * SAVED_BY_NORM
        return attention + ffn + norm, 2 * attention + ffn + norm

    def logit_bytes(self, batch: int) -> int:
        """Return the bytes of the logits in 16 bits, in 32 bits for the loss, and of their 32-bit gradient."""
        return batch * self.sequence * self.vocab * (HALF + SINGLE + SINGLE)
