"""Shape of a transformer whose costs are computed by formulas: what GPTs and T5s, with or without experts, share."""

from abc import ABC, abstractmethod
from typing import Literal

from patrickstar._perf_model.experts import Experts, FeedForward

Checkpointing = bool | Literal["products"]
"""All layers store all activations (False), their input (True), or what their products and their attention return."""
HALF, SINGLE = 2, 4
"""Bytes of a 16-bit and of a 32-bit number."""

SAVED_TRAFFIC, RECOMPUTED_TRAFFIC = 3.6, 0.9
"""Bytes that a layer's element-wise operators read and write per byte that it saves, and more if it is recomputed.

These and the following are fitted to traces of GPT-2-like models of 2 to 6 layers, and come within 3 % of them.
"""
LOGIT_TRAFFIC, GRADIENT_TRAFFIC = 45, 6.3
"""Bytes read and written per logit, and for the gradient of an element of a layer, beside matrix products."""
EMBEDDING_TRAFFIC, TIED_TRAFFIC = 9, 15
"""Bytes read and written for the gradient of an element of the embedding, alone or as the head's weight, too."""


class TransformerShape(ABC):
    """Transformer of equal layers, some of which may have experts in place of the feed-forward network.

    Methods with the argument `tp` return the part of one of `tp` tensor-parallel processes, which divide heads, the
    feed-forward network and the vocabulary; norms, positions, routers and the inputs of layers are in all of them.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    experts: Experts | None
    head: bool = True
    """Logits are computed with the tied embedding weight."""

    @property
    @abstractmethod
    def described_layers(self) -> str:
        """Number of layers in words."""

    @property
    @abstractmethod
    def feed_forward(self) -> FeedForward:
        """Feed-forward network of a layer, or of one expert."""

    @property
    @abstractmethod
    def expert_layers(self) -> int:
        """Number of layers with experts."""

    @abstractmethod
    def layer_part(self, tp: int) -> int:
        """Return the parameters of the largest layer without experts in one of `tp` processes."""

    @abstractmethod
    def dense_numel(self, tp: int = 1) -> int:
        """Return the parameters outside of experts in one of `tp` processes."""

    @abstractmethod
    def all_reduces(self, recompute: bool, exchanged: bool = False) -> float:
        """Return the tensor-parallel all-reduces of a step, in hidden units per token.

        `exchanged`: experts are in other processes; each process routes a part of the tokens, and an all-gather, half
        of an all-reduce, follows.
        """

    @abstractmethod
    def layer_operations(self, tokens: int) -> int:
        """Return the forward operations of one layer of each stack: matrices, scores and weighted sums.

        Masked scores count.
        """

    @abstractmethod
    def activation_bytes(self, batch: int, checkpointing: Checkpointing, tp: int = 1, expert_bytes: float = 0) -> float:
        """Return the peak of saved activations with fused attention, which saves no scores.

        Args:
            expert_bytes: Bytes that the experts of one layer save for backward in this process.
        """

    def traffic_bytes(self, batch: int, checkpointing: bool, tp: int = 1, expert_bytes: float = 0) -> float:
        """Return the bytes of operators that take the time of their memory traffic, outside of experts' gradients.

        Attention is fused: scores are neither read nor written. `expert_bytes`: as for `activation_bytes`.
        """
        words = -(-self.vocab // tp)
        layers = SAVED_TRAFFIC + (RECOMPUTED_TRAFFIC if checkpointing else 0)
        nbytes = layers * self.activation_bytes(batch, False, tp, expert_bytes)
        nbytes += LOGIT_TRAFFIC * batch * self.sequence * words if self.head else 0
        nbytes += (TIED_TRAFFIC if self.head else EMBEDDING_TRAFFIC) * words * self.hidden
        return nbytes + GRADIENT_TRAFFIC * (self.dense_numel(tp) - words * self.hidden)

    @property
    def numel(self) -> int:
        """Number of all parameters, including final norms."""
        experts = self.experts.count * self.feed_forward.numel() if self.experts is not None else 0
        return self.dense_numel() + self.expert_layers * experts

    @property
    def router_numel(self) -> int:
        """Number of parameters of the router of one layer with experts."""
        return self.experts.count * self.hidden if self.experts is not None else 0

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
        logits = 2 * tokens * self.vocab * self.hidden if self.head else 0
        routers = self.expert_layers * 2 * tokens * self.router_numel
        return (passes * forward + 3 * logits) // tp + passes * routers

    def logit_bytes(self, batch: int, tp: int = 1) -> int:
        """Return the bytes of the logits in 16 bits, in 32 bits for the loss, and of their 32-bit gradient."""
        vocab = -(-self.vocab // tp)
        return batch * self.sequence * vocab * (HALF + SINGLE + SINGLE) if self.head else 0
