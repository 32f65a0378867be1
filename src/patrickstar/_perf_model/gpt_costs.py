"""The shape of a GPT, and what follows from it by counting: parameters, operations, activations."""

from dataclasses import dataclass

HALF, SINGLE = 2, 4
"""Bytes of a number in 16 and in 32 bits."""

PAPER_OPERATIONS = 8
"""Operations per parameter and token that the paper counts: two forward, two for the recomputation, four backward."""

SAVED_BYTES_PER_HIDDEN = 34
SAVED_BYTES_PER_SCORE = 5
"""What one layer saves for its backward: 34 bytes per token and hidden unit, and 5 per attention score, of which there
are heads x sequence per token (Korthikanti et al. 2022, equation 1)."""


@dataclass(frozen=True)
class Gpt:
    """A transformer whose layers are all alike: attention, then a feed-forward part four times as wide.

    head: whether logits are computed, with the embedding's weight; a classifier has none.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    sequence: int = 1024
    head: bool = True

    @property
    def layer_numel(self) -> int:
        """Parameters of one layer: matrices, biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_numel(self) -> int:
        """Parameters that are looked up: tokens and positions."""
        return (self.vocab + self.sequence) * self.hidden

    @property
    def numel(self) -> int:
        """All parameters, the last norm's too."""
        return self.layers * self.layer_numel + self.embedding_numel + 2 * self.hidden

    def layer_tensors(self) -> tuple[int, ...]:
        """The elements of each parameter of one layer, in creation order."""
        hidden = self.hidden
        square, attention, norm = hidden**2, (hidden**2, hidden) * 4, (hidden, hidden)
        return (*attention, *norm, 4 * square, 4 * hidden, 4 * square, hidden, *norm)

    def paper_operations(self, tokens: int) -> int:
        """Operations of a step with recomputation, as the paper counts them: 8 per parameter and token."""
        return PAPER_OPERATIONS * self.numel * tokens

    def layer_operations(self, tokens: int) -> int:
        """Operations of one layer's forward: its matrices, its scores and what they weigh (masked ones too)."""
        return tokens * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    def logit_operations(self, tokens: int) -> int:
        """Operations of the head's forward."""
        return 2 * tokens * self.vocab * self.hidden if self.head else 0

    def operations(self, tokens: int, recompute: bool = True) -> int:
        """Operations that a step has to do: a backward is two forwards, and layers run once more if recomputed."""
        layers = self.layers * self.layer_operations(tokens)
        return (4 if recompute else 3) * layers + 3 * self.logit_operations(tokens)

    def checkpoint_bytes(self, batch: int, layers: int | None = None) -> int:
        """The inputs of `layers` layers (all of them by default), kept in 16 bits until their backward."""
        kept = self.layers if layers is None else layers
        return kept * batch * self.sequence * self.hidden * HALF

    def score_numel(self, batch: int) -> int:
        """Attention scores of one layer."""
        return batch * self.heads * self.sequence**2

    def saved_bytes(self, batch: int) -> int:
        """What one layer saves for its backward, if attention keeps its scores."""
        hidden = SAVED_BYTES_PER_HIDDEN * batch * self.sequence * self.hidden
        return hidden + SAVED_BYTES_PER_SCORE * self.score_numel(batch)

    def logit_bytes(self, batch: int) -> int:
        """Logits in 16 bits, in 32 for the loss, and their gradient in 32."""
        return batch * self.sequence * self.vocab * (HALF + SINGLE + SINGLE) if self.head else 0
