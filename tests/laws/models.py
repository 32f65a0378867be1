"""Small random models, budgets and meters that the laws are tested over."""

import dataclasses
from collections.abc import Iterable

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import patrickstar as ps
from patrickstar.engine.engine import Engine
from patrickstar.memory.chunk import Chunk

WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A random model: its blocks by kind, what is tied, frozen and checkpointed."""

    blocks: tuple[str, ...]
    tied: bool
    frozen_norms: bool
    checkpointing: bool

    def build(self) -> nn.Module:
        """The model, initialised from the current seed."""
        return Model(self)


def _block(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
    if kind == "attention":
        return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())


class Model(nn.Module):
    """An embedding, blocks, and a head, which may be tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(_block(kind) for kind in shape.blocks)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if shape.tied:
            self.head.weight = self.words.weight
        if shape.frozen_norms:
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean square of the head's output."""
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.shape.checkpointing else block(hidden)
        return self.head(hidden).float().pow(2).mean()


shapes = st.builds(
    Shape,
    blocks=st.lists(st.sampled_from(["mlp", "attention", "plain"]), min_size=1, max_size=4).map(tuple),
    tied=st.booleans(),
    frozen_norms=st.booleans(),
    checkpointing=st.booleans(),
)
chunk_sizes = st.sampled_from([64, 256, 700, 4096, "auto"])
precisions = st.sampled_from(["bf16", "fp16", "fp32"])


def batches(count: int, length: int = 5) -> list[tuple[torch.Tensor]]:
    """Token ids, the same at each call."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randint(0, 11, (2, length), generator=generator),) for _ in range(count)]


def config(precision: str, chunk_size: int | str, **budgets: int) -> ps.Config:
    """AdamW under the given budgets."""
    optimizer = ps.AdamW(lr=1e-2, weight_decay=0.1)
    return ps.Config(device="cpu", precision=precision, chunk_size=chunk_size, optimizer=optimizer, **budgets)


class Waves:
    """A meter that pretends non-model data comes and goes, the same way in each iteration, up to `peak_bytes`."""

    source = "a made-up wave"
    counts_freed = False

    def __init__(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        self.calls = 0

    def calibrate(self, chunk_bytes: int) -> None:
        """Nothing to take note of."""

    def now(self, chunk_bytes: int) -> int:
        self.calls += 1
        return self.peak_bytes * (self.calls % 7) // 6

    def peak(self, chunk_bytes: int) -> int:
        return self.now(chunk_bytes)

    def restart(self) -> None:
        """Nothing to forget."""

    def reclaim(self) -> None:
        """Nothing to give back."""


def smallest_device_bytes(shape: Shape, chunk_size: int | str, precision: str) -> int:
    """What the most demanding operator of the model needs at once: an attention layer's chunks, found by trying."""
    engine = Engine(shape.build, config(precision, chunk_size), meter=Waves(0))
    seen = [0]
    access = engine._data.access

    def watch(slots, belongs):
        seen.append(sum({slot.chunk.index: slot.chunk.nbytes for slot in slots}.values()))
        access(slots, belongs)

    engine._data.access = watch
    train(engine, 1)
    engine.close()
    return max(seen)


def train(engine: Engine, steps: int) -> list[float]:
    """The usual loop."""
    losses = []
    for (ids,) in batches(steps):
        loss = engine(ids)
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def real_bytes(chunks: Iterable[Chunk]) -> tuple[int, int]:
    """Bytes that chunks really take on the device and on the host."""
    return sum(chunk.storage.nbytes() for chunk in chunks), sum(
        0 if chunk.host is None else chunk.host.untyped_storage().nbytes() for chunk in chunks
    )
