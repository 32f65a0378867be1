"""Tiny models of DTensors, deterministic from a seed, and their batches: by PyTorch's and by transformers' plans."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from integrations import tiny
from torch import nn
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.utils.checkpoint import checkpoint

from patrickstar._autograd.selective_checkpoint import selective_contexts
from patrickstar.integrations._meshes import Meshes, MeshSizes, meshes
from patrickstar.integrations.transformers import parallelize, stack_experts

WIDTH, VOCABULARY, LENGTH = 32, 64, 8
CHECKPOINTING = ("none", "reentrant", "non-reentrant", "selective")
"""Ways of activation checkpointing."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels, both of shape (sequences, LENGTH)."""


def checkpoint_options(way: str) -> dict[str, Any]:
    """Return the options of `torch.utils.checkpoint.checkpoint` for a way of checkpointing."""
    contexts = {"context_fn": selective_contexts} if way == "selective" else {}
    return {"use_reentrant": way == "reentrant", **contexts}


@dataclass(frozen=True)
class MeshModel:
    """A model, how it is made parallel, and for which sizes of meshes.

    Attributes:
        build: Function that builds the whole model, with a way of checkpointing; its forward takes a batch and returns
            the mean loss of the batch's tokens.
        split: Function that makes parameters DTensors, in place.
        tp, ep: Sizes of the meshes with four processes.
        context: Context in which forward and backward must run.
    """

    build: Callable[[str], nn.Module]
    split: Callable[[nn.Module, Meshes], None]
    tp: int = 1
    ep: int = 1
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def meshes(self) -> Meshes:
        """Return the meshes of four processes."""
        return _meshes(self.tp, self.ep)

    def whole(self, checkpointing: str = "none", seed: int = 0) -> nn.Module:
        """Return the whole model: the same in each process, call and mesh."""
        torch.manual_seed(seed)
        return self.build(checkpointing).train()

    def parallel(self, meshes: Meshes, checkpointing: str = "none", seed: int = 0) -> nn.Module:
        """Return the model with this process's parts of the parameters, cut from what `whole` returns."""
        model = self.whole(checkpointing, seed)
        self.split(model, meshes)
        return model


@cache
def _meshes(tp: int, ep: int) -> Meshes:
    """Make meshes once in a process: the threads of their groups run until the groups are destroyed."""
    return meshes(MeshSizes(4, tp, ep), "cpu")


def batch(number: int, data_rank: int, sequences: int = 2) -> Batch:
    """Return a batch by its number in time and by the data coordinate of its processes."""
    generator = torch.Generator().manual_seed(1000 * number + data_rank)
    tokens = torch.randint(1, VOCABULARY, (sequences, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# PyTorch's parallel.parallelize_module


class Attention(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.head_dim = WIDTH // heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # The number of heads is that of this process.
        q, k, v = (
            layer(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.attention, self.second_norm = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        up, down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.feed = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.first_norm(hidden))
        return hidden + self.feed(self.second_norm(hidden))


class Decoder(nn.Module):
    """Embedding, two blocks, a norm and a head."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            if self.checkpointing == "none":
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, **checkpoint_options(self.checkpointing))
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits.float(), labels.flatten())
        return getattr(loss, "to_local", lambda: loss)()


def split_decoder(sequences: bool = False, losses: bool = False) -> Callable[[nn.Module, Meshes], None]:
    """Return a function that applies PyTorch's styles to a `Decoder`.

    Args:
        sequences: Shard activations between layers by their sequence, so that norms see a part of it.
        losses: Shard the logits by the vocabulary, for `parallel.loss_parallel`.
    """
    between = Shard(1) if sequences else Replicate()
    plan: dict[str, Any] = {
        "words": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": parallel.ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1) if losses else Replicate(), use_local_output=not losses
        ),
        **{f"blocks.*.attention.{key}": parallel.ColwiseParallel() for key in "qkv"},
        "blocks.*.attention.o": parallel.RowwiseParallel(output_layouts=between),
        "blocks.*.feed.up": parallel.ColwiseParallel(),
        "blocks.*.feed.down": parallel.RowwiseParallel(output_layouts=between),
    }
    if sequences:
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {f"blocks.*.{key}": parallel.PrepareModuleInput(**whole) for key in ("attention", "feed")}
        plan |= {key: parallel.SequenceParallel() for key in ("blocks.*.first_norm", "blocks.*.second_norm", "norm")}

    def split(model: nn.Module, meshes: Meshes) -> None:
        assert meshes.tp is not None
        parallel.parallelize_module(model, meshes.tp, plan)

    return split


# transformers' plans


class WithLoss(nn.Module):
    """Model of transformers that returns its loss: of a causal model for the next tokens, else for the labels."""

    def __init__(self, model: transformers.PreTrainedModel, checkpointing: str) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        model.config.use_cache = False
        if checkpointing != "none":
            model.activation_checkpointing_enable(checkpoint_options(checkpointing))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.model.config.is_encoder_decoder:
            return self.model(input_ids=ids, labels=labels, use_cache=False).loss
        return self.model(input_ids=ids, labels=ids).loss


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
}


def causal(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """Return a function that builds a causal model of a type."""
    config = transformers.CONFIG_MAPPING[kind](**SIZES | {"tie_word_embeddings": False} | options)
    return lambda way: WithLoss(transformers.AutoModelForCausalLM.from_config(config), way)


def mixtral(idle: bool = False) -> Callable[[str], nn.Module]:
    """Return a function that builds a model with four experts, of which a token chooses two.

    `idle`: all tokens choose the same two experts, so that most processes get none.
    """
    build = causal("mixtral", num_local_experts=4, num_experts_per_tok=2)

    def built(way: str) -> nn.Module:
        model = build(way)
        for layer in model.model.model.layers if idle else ():
            layer.mlp.gate.weight.requires_grad_(False).zero_()  # equal scores: the choice is the same for all tokens
        return model

    return built


def switch(checkpointing: str) -> nn.Module:
    """Return a T5 with stacked experts, some of which get more tokens than their capacity."""
    model = tiny.switch(capacity=3, vocab_size=VOCABULARY)
    stack_experts(model)
    return WithLoss(model, checkpointing)


QWEN3 = causal("qwen3", head_dim=8)
"""Its norms of queries and keys get hooks on their gradients from transformers."""
QWEN2_MOE = causal(
    "qwen2_moe", moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=2
)
"""Has experts, and one that all tokens share."""


def split_by_plan(model: nn.Module, meshes: Meshes) -> None:
    """Apply the plans of transformers."""
    parallelize(model.model, tp=meshes.tp, ep=meshes.ep)


MODELS: dict[str, MeshModel] = {
    "decoder": MeshModel(Decoder, split_decoder(), tp=2),
    "decoder, sequences": MeshModel(Decoder, split_decoder(sequences=True), tp=2),
    "decoder, losses": MeshModel(Decoder, split_decoder(losses=True), tp=2, context=parallel.loss_parallel),
    "decoder, both": MeshModel(
        Decoder, split_decoder(sequences=True, losses=True), tp=2, context=parallel.loss_parallel
    ),
    "llama": MeshModel(causal("llama"), split_by_plan, tp=2),
    "llama tied": MeshModel(causal("llama", tie_word_embeddings=True), split_by_plan, tp=2),
    "qwen3": MeshModel(QWEN3, split_by_plan, tp=2),
    "mixtral, sliced experts": MeshModel(mixtral(), split_by_plan, tp=2),
    "mixtral": MeshModel(mixtral(), split_by_plan, ep=4),
    "mixtral, idle": MeshModel(mixtral(idle=True), split_by_plan, ep=4),
    "mixtral, copies": MeshModel(mixtral(), split_by_plan, ep=2),
    "qwen2_moe": MeshModel(QWEN2_MOE, split_by_plan, ep=4),
    "switch": MeshModel(switch, split_by_plan, ep=4),
    "mixtral, tensors and experts": MeshModel(mixtral(), split_by_plan, tp=2, ep=4),
    "mixtral, idle tensors and experts": MeshModel(mixtral(idle=True), split_by_plan, tp=2, ep=4),
    "qwen2_moe, tensors and experts": MeshModel(QWEN2_MOE, split_by_plan, tp=2, ep=4),
}
"""Models by name. `ep=2` with four processes: each expert is on two of them."""
