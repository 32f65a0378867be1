"""Costs of an open decoder by its shape: parameters, operations, activations; trained whole or with adapters.

Counts are those of a trace of transformers' models (`_dry_run/traced_workload.py`), which takes seconds per batch.
A test compares both. Bytes of activations and of element-wise operators are those of Llama's layers.
"""

from dataclasses import dataclass

from patrickstar._perf_model.adapters import Adapters
from patrickstar._perf_model.transformer_shape import HALF, SINGLE, Checkpointing
from patrickstar._perf_model.workload import PRODUCTS_ONLY, Workload

LOGIT_BYTES = 12
"""Bytes per logit at the loss: in 16 bits, in fp32, their log-softmax, and half of its gradient."""
BLOCK_NUMEL, CODE_BYTES = 64, 64
"""Elements of a block of 4-bit parameters, which has a constant in fp32, and bytes of a matrix's table of values."""

CAPPED_BYTES = HALF
"""Bytes per logit of the tanh that caps them."""

LOGIT_TRAFFIC, CAPPED_TRAFFIC = 48, 20
"""Bytes read and written per logit, and to cap it, beside matrix products."""
GRADIENT_TRAFFIC, EMBEDDING_TRAFFIC, TIED_TRAFFIC = 4.4, 9, 14
"""Bytes read and written for the gradient of an element: of a layer, of embedding or head, of both if they are tied."""
SAVED_TRAFFIC, RECOMPUTED_TRAFFIC = 10, 2.75
"""Bytes read and written by a layer's element-wise operators per byte that it saves, and in a recomputation."""
ADAPTED_TRAFFIC, RECOMPUTED_ADAPTED_TRAFFIC = 54, 27
"""Bytes read and written per element of the output of a linear layer with an adapter: casts, scaling, sums in fp32."""


@dataclass(frozen=True)
class Decoder:
    """Transformer of equal layers with gated feed-forward networks.

    Attributes:
        linears: Width of input and output of each linear layer of a layer.
        biases: Elements of their biases, in each layer.
        norms: Norms of the hidden width in each layer.
        head_norms: Elements of the norms of queries and keys, in each layer.
        tied: The head's weight is the embedding's.
        capped: Logits are capped by a tanh.
        experts: Number of experts of a layer, 1 without experts; `top_k`: those that a token passes.
        expert_numel: Elements of one expert; 0 without experts.
    """

    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    linears: tuple[tuple[int, int], ...]
    biases: int
    norms: int
    head_norms: int
    tied: bool
    capped: bool = False
    experts: int = 1
    top_k: int = 1
    expert_numel: int = 0

    @property
    def linear_numel(self) -> int:
        """Elements of the matrices of a layer's linear layers."""
        return sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def layer_numel(self) -> int:
        """Number of parameters of a layer."""
        router = self.experts * (self.expert_numel + self.hidden) if self.expert_numel else 0
        return self.linear_numel + self.biases + self.norms * self.hidden + self.head_norms + router

    @property
    def numel(self) -> int:
        """Number of all parameters."""
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * self.layer_numel + embeddings + self.hidden

    def adapter_numel(self, rank: int) -> int:
        """Return the number of parameters of the adapters."""
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def workload(self, batch: int, sequence: int, checkpointing: Checkpointing, adapters: Adapters | None) -> Workload:
        """Return the workload of a step of one process, with fused attention."""
        tokens = batch * sequence
        products, thin, size = self._products(tokens, checkpointing, adapters)
        attention = 4 * tokens * sequence * self.heads * self.head_dim
        packed = adapters is not None and adapters.quantized
        linears = self.layers * self.linear_numel
        frozen = self.numel if adapters is not None else 0
        packed_bytes = self.layers * sum(-(-inputs * outputs // 2) for inputs, outputs in self.linears)
        return Workload(
            params=self.numel if adapters is None else self.adapter_numel(adapters.rank),
            batch=batch,
            tokens=tokens,
            checkpointing=PRODUCTS_ONLY if checkpointing == "products" else checkpointing,
            # Forward, two and a half times as much in backward, and forward again if it is recomputed.
            operations=products + thin + self.layers * attention * (4.5 if checkpointing is True else 3.5),
            matrix_size=max(1, round(size)),
            non_model_bytes=self._non_model_bytes(tokens, checkpointing, adapters),
            working_bytes=HALF * (self.vocab * self.hidden + self.layer_numel),
            param_bytes=HALF if adapters is None else SINGLE,
            frozen_params=frozen,
            frozen_bytes=HALF * (frozen - linears) + packed_bytes if packed else HALF * frozen,
            other_bytes=self._other_bytes(tokens, bool(checkpointing), adapters),
            thin_operations=thin,
            peak_working_bytes=HALF * self.vocab * self.hidden,  # of the head: the loss has the peak
        )

    def _products(
        self, tokens: int, checkpointing: Checkpointing, adapters: Adapters | None
    ) -> tuple[float, float, float]:
        """Return the operations of products with the base and with adapters, and the mean smallest side of the former.

        A trained weight takes part in three products: of forward, of the gradient of its input and of its own. A frozen
        one has no gradient, and takes part in two. Recomputation repeats those of forward, unless they are stored, as
        those of packed weights never are. The products of adapters are thin: they take the time of their traffic,
        whatever their sides.
        """
        again = checkpointing is True
        packed = adapters is not None and adapters.quantized
        base = (3 if adapters is None else 2) + (again or (packed and bool(checkpointing)))
        found = [
            (self.layers * base * 2 * tokens * inputs * outputs, min(tokens, inputs, outputs))
            for inputs, outputs in self.linears
        ]
        if adapters is None and again and not self.expert_numel:
            inputs, outputs = self.linears[-1]  # nothing needs its output again
            found.append((-self.layers * 2 * tokens * inputs * outputs, min(tokens, inputs, outputs)))
        if self.expert_numel:
            operations = self.layers * base * 2 * tokens * self.top_k * self.expert_numel
            found.append((operations, min(self.hidden, self.ffn, max(1, tokens * self.top_k // self.experts))))
        head = (3 if adapters is None else 2) * 2 * tokens * self.vocab * self.hidden
        found.append((head, min(tokens, self.hidden)))
        total, over_size = sum(count for count, _ in found), sum(count / size for count, size in found)
        thin = 0
        if adapters is not None:
            widths = sum(inputs + outputs for inputs, outputs in self.linears)
            thin = self.layers * (3 + again) * 2 * tokens * widths * adapters.rank
        return total, thin, total / over_size

    def _saved_bytes(self, adapters: Adapters | None) -> int:
        """Return the bytes that a layer saves for backward per token.

        Norms save their input in fp32 and, to train their weight and the next one, two tensors in 16 bits. Attention
        saves queries, keys, values and its output. A gated network saves the gate, its activation, the other factor
        and, to train the next weight, the product. Adapters save the input of each linear layer in fp32.
        """
        attention = 2 * HALF * self.head_dim * (self.heads + self.kv_heads)
        norms, gates = (8, 8) if adapters is None else (4, 6)
        normed = self.norms * self.hidden
        if self.head_norms:
            normed += self.head_dim * (self.heads + self.kv_heads)
        saved = norms * normed + attention + gates * self.top_k * self.ffn
        if adapters is not None:
            saved += SINGLE * sum(inputs + adapters.rank for inputs, _ in self.linears)
        return saved

    def _product_bytes(self, adapters: Adapters | None) -> int:
        """Return the bytes per token that products and attention of a layer return, and the input of the layer."""
        outputs = sum(outputs for _, outputs in self.linears)
        returned = HALF * (self.hidden + self.heads * self.head_dim)
        if adapters is None or not adapters.quantized:
            returned += HALF * outputs
        if self.expert_numel:
            returned += HALF * self.top_k * (2 * self.ffn + self.hidden)
        if adapters is not None:
            returned += SINGLE * (outputs + len(self.linears) * adapters.rank)
        return returned

    def _non_model_bytes(self, tokens: int, checkpointing: Checkpointing, adapters: Adapters | None) -> int:
        layer = tokens * self._saved_bytes(adapters)
        stored = {False: layer, True: HALF * tokens * self.hidden, "products": tokens * self._product_bytes(adapters)}
        saved = self.layers * stored[checkpointing]
        hidden = tokens * self.hidden * (2 if adapters is None else 1) * SINGLE
        logits = tokens * self.vocab * (LOGIT_BYTES + (CAPPED_BYTES if self.capped else 0))
        at_loss = saved + logits + hidden
        gradient = HALF * (self.expert_numel * self.experts or self.ffn * self.hidden) if adapters is None else 0
        again = layer - (stored["products"] if checkpointing == "products" else 0) if checkpointing else 0
        in_layer = saved + again + 7 * self.top_k * self.ffn * tokens + gradient
        at_head = 0
        if adapters is None:  # the head's gradient, or of a tied one also the embedding's and their sum
            gradients = (3 if self.tied else 1) * HALF * self.vocab * self.hidden
            at_head = gradients + (0 if self.tied else saved + HALF * tokens * self.vocab)
        constants = 0
        if adapters is not None and adapters.quantized:
            blocks = sum(-(-inputs * outputs // BLOCK_NUMEL) for inputs, outputs in self.linears)
            constants = self.layers * (SINGLE * blocks + CODE_BYTES * len(self.linears))
        return max(at_loss, in_layer, at_head) + constants

    def _other_bytes(self, tokens: int, checkpointing: bool, adapters: Adapters | None) -> int:
        traffic = SAVED_TRAFFIC + (RECOMPUTED_TRAFFIC if checkpointing else 0)
        nbytes = self.layers * traffic * tokens * self._saved_bytes(None)
        nbytes += tokens * self.vocab * (LOGIT_TRAFFIC + (CAPPED_TRAFFIC if self.capped else 0))
        if adapters is None:
            embedding = self.vocab * self.hidden * (TIED_TRAFFIC if self.tied else 2 * EMBEDDING_TRAFFIC)
            return round(nbytes + GRADIENT_TRAFFIC * self.layers * self.layer_numel + embedding)
        adapted = ADAPTED_TRAFFIC + (RECOMPUTED_ADAPTED_TRAFFIC if checkpointing else 0)
        nbytes += self.layers * adapted * tokens * sum(outputs for _, outputs in self.linears)
        products = 4 if checkpointing else 3  # as in `_products`: each reads or writes both widths in fp32
        nbytes += self.layers * products * SINGLE * tokens * sum(inputs + outputs for inputs, outputs in self.linears)
        if adapters.quantized:  # half a byte is read and two are written per element, in each pass
            nbytes += (3 if checkpointing else 2) * 2.5 * self.layers * self.linear_numel
        return round(nbytes)
