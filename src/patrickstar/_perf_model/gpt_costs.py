"""Analytic costs of a GPT: parameters, floating-point operations and activation bytes."""

from dataclasses import dataclass

from patrickstar._perf_model.experts import Experts, FeedForward

HALF, SINGLE = 2, 4
"""Bytes of a 16-bit and of a 32-bit number."""

PAPER_OPERATIONS = 8
"""Operations per parameter and token in the paper's count: two forward, two for recomputation, four backward."""

SAVED_BYTES_PER_HIDDEN = 34
SAVED_BYTES_PER_SCORE = 5
"""Bytes that one layer saves for backward: 34 per token and hidden unit, and 5 per attention score, of which there are
heads x sequence per token (Korthikanti et al. 2022, equation 1)."""
DIVIDED_SAVED_BYTES = 24
"""Those of the 34 bytes that tensor parallelism divides (equation 2)."""
GELU_SAVED_BYTES = 4
"""Bytes that a token saves per unit of the feed-forward network: input and output of GELU."""


@dataclass(frozen=True)
class Gpt:
    """Transformer of equal layers: attention, then a feed-forward network four times as wide.

    `head`: compute logits with the tied embedding weight; a classifier has no such head. `experts`: some layers have
    experts in place of the feed-forward network.

    Methods with the argument `tp` return the part of one of `tp` tensor-parallel processes, which divide heads, the
    feed-forward network and the vocabulary; norms, positions, routers and the inputs of layers are in all of them.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    sequence: int = 1024
    head: bool = True
    experts: Experts | None = None

    @property
    def layer_numel(self) -> int:
        """Number of parameters of one layer: matrices, biases and norms."""
        return self.layer_part(1)

    def layer_part(self, tp: int) -> int:
        """Return the parameters of one layer without experts in one of `tp` processes."""
        return (12 * self.hidden**2 + 7 * self.hidden) // tp + 6 * self.hidden

    @property
    def embedding_numel(self) -> int:
        """Number of embedding parameters: tokens and positions."""
        return (self.vocab + self.sequence) * self.hidden

    @property
    def numel(self) -> int:
        """Number of all parameters, including the final norm."""
        experts = self.experts.count * self.feed_forward.numel() if self.experts is not None else 0
        return self.dense_numel() + self.expert_layers * experts

    @property
    def feed_forward(self) -> FeedForward:
        """Feed-forward network of a layer, or of one expert."""
        return FeedForward(self.hidden, 4 * self.hidden, biases=True, saved_bytes_per_unit=GELU_SAVED_BYTES)

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers // self.experts.every if self.experts is not None else 0

    @property
    def router_numel(self) -> int:
        """Number of parameters of the router of one layer with experts."""
        return self.experts.count * self.hidden if self.experts is not None else 0

    def dense_numel(self, tp: int = 1) -> int:
        """Return the parameters outside of experts in one of `tp` processes."""
        vocab = -(-self.vocab // tp)
        return (
            self.layers * self.layer_part(tp)
            + self.expert_layers * (self.router_numel - self.feed_forward.numel(tp))
            + (vocab + self.sequence) * self.hidden
            + 2 * self.hidden
        )

    def all_reduces(self, recompute: bool, exchanged: bool = False) -> float:
        """Return the tensor-parallel all-reduces of a step, in hidden units per token.

        Attention and feed-forward network sum their outputs in forward and the gradients of their inputs in backward;
        the embedding sums its outputs, the head the gradients of its inputs. `exchanged`: experts are in other
        processes; each process routes a part of the tokens, and an all-gather, half of an all-reduce, follows.
        """
        sums = 2 * self.layers - (self.expert_layers / 2 if exchanged else 0)
        return (3 if recompute else 2) * sums + 1 + self.head

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
        experts = self.experts.top_k if self.experts is not None else 0
        in_experts = self.expert_layers * experts * self.feed_forward.operations(tokens)
        return self.dense_operations(tokens, recompute) + (4 if recompute else 3) * in_experts

    def dense_operations(self, tokens: int, recompute: bool = True, tp: int = 1) -> int:
        """Return the operations of a step outside of experts in one of `tp` processes."""
        passes = 4 if recompute else 3
        forward = self.layers * self.layer_operations(tokens)
        forward -= self.expert_layers * self.feed_forward.operations(tokens)
        routers = self.expert_layers * 2 * tokens * self.router_numel
        return (passes * forward + 3 * self.logit_operations(tokens)) // tp + passes * routers

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

    def activation_bytes(self, batch: int, checkpointing: bool, tp: int = 1, expert_bytes: float = 0) -> float:
        """Return the peak of saved activations with fused attention, which saves no scores.

        Args:
            expert_bytes: Bytes that the experts of one layer save for backward in this process.
        """
        unit = batch * self.sequence * self.hidden
        layer = unit * (SAVED_BYTES_PER_HIDDEN - DIVIDED_SAVED_BYTES + DIVIDED_SAVED_BYTES / tp)
        instead = expert_bytes - batch * self.sequence * self.feed_forward.saved_bytes(tp)
        if checkpointing:
            return self.checkpoint_bytes(batch) + layer + (max(0.0, instead) if self.expert_layers else 0)
        return self.layers * layer + self.expert_layers * instead

    def logit_bytes(self, batch: int, tp: int = 1) -> int:
        """Return the bytes of the logits in 16 bits, in 32 bits for the loss, and of their 32-bit gradient."""
        vocab = -(-self.vocab // tp)
        return batch * self.sequence * vocab * (HALF + SINGLE + SINGLE) if self.head else 0
