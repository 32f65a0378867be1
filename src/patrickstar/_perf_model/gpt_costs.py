"""Analytic costs of a GPT: parameters, floating-point operations and activation bytes."""

from dataclasses import dataclass

HALF, SINGLE = 2, 4
"""Bytes of a 16-bit and of a 32-bit number."""

PAPER_OPERATIONS = 8
"""Operations per parameter and token in the paper's count: two forward, two for recomputation, four backward."""

SAVED_BYTES_PER_HIDDEN = 34
SAVED_BYTES_PER_SCORE = 5
"""Bytes that one layer saves for backward: 34 per token and hidden unit, and 5 per attention score, of which there are
heads x sequence per token (Korthikanti et al. 2022, equation 1)."""


@dataclass(frozen=True)
class Gpt:
    """Transformer of equal layers: attention, then a feed-forward network four times as wide.

    `head`: compute logits with the tied embedding weight; a classifier has no such head.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    sequence: int = 1024
    head: bool = True

    @property
    def layer_numel(self) -> int:
        """Number of parameters of one layer: matrices, biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_numel(self) -> int:
        """Number of embedding parameters: tokens and positions."""
        return (self.vocab + self.sequence) * self.hidden

    @property
    def numel(self) -> int:
        """Number of all parameters, including the final norm."""
        return self.layers * self.layer_numel + self.embedding_numel + 2 * self.hidden

    def layer_tensors(self) -> tuple[int, ...]:
        """Return the number of elements of each parameter of one layer, in creation order."""
        hidden = self.hidden
        square, attention, norm = hidden**2, (hidden**2, hidden) * 4, (hidden, hidden)
        return (*attention, *norm, 4 * square, 4 * hidden, 4 * square, hidden, *norm)

    def paper_operations(self, tokens: int) -> int:
        """Return the operations of a step with recomputation by the paper's count: 8 per parameter and token."""
        return PAPER_OPERATIONS * self.numel * tokens

    def layer_operations(self, tokens: int) -> int:
        """Return the forward operations of one layer: matrices, scores and weighted sums (masked ones included)."""
        return tokens * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    def logit_operations(self, tokens: int) -> int:
        """Return the forward operations of the head."""
        return 2 * tokens * self.vocab * self.hidden if self.head else 0

    def operations(self, tokens: int, recompute: bool = True) -> int:
        """Return the operations of a step: a backward costs two forwards, recomputation one more per layer."""
        layers = self.layers * self.layer_operations(tokens)
        return (4 if recompute else 3) * layers + 3 * self.logit_operations(tokens)

    def checkpoint_bytes(self, batch: int, layers: int | None = None) -> int:
        """Return the bytes of the 16-bit checkpointed inputs of `layers` layers (default: all)."""
        count = self.layers if layers is None else layers
        return count * batch * self.sequence * self.hidden * HALF

    def score_numel(self, batch: int) -> int:
        """Return the number of attention scores of one layer."""
        return batch * self.heads * self.sequence**2

    def saved_bytes(self, batch: int) -> int:
        """Return the bytes that one layer saves for backward if attention saves its scores."""
        hidden = SAVED_BYTES_PER_HIDDEN * batch * self.sequence * self.hidden
        return hidden + SAVED_BYTES_PER_SCORE * self.score_numel(batch)

    def logit_bytes(self, batch: int) -> int:
        """Return the bytes of the logits in 16 bits, in 32 bits for the loss, and of their 32-bit gradient."""
        return batch * self.sequence * self.vocab * (HALF + SINGLE + SINGLE) if self.head else 0
