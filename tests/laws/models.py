"""Descriptions of random models, configurations and meters for the tests of the invariants ("laws")."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from probes import manager_of, record_accesses, shards_of
from toys import Shape, batches, module, train
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL
from patrickstar._tiers.chunk import Chunk, Region

shapes = st.builds(
    Shape,
    blocks=st.lists(st.sampled_from(["mlp", "attention", "plain"]), min_size=1, max_size=4).map(tuple),
    tied=st.booleans(),
    frozen_norms=st.booleans(),
    checkpointing=st.booleans(),
    tiled=st.booleans(),
)
chunk_sizes = st.sampled_from([256, 1024, 2800, 16384, "auto"])
precisions = st.sampled_from(["bf16", "fp16", "fp32"])


LLAMA = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512)
llama = module(
    lambda m, ids, labels: m.llama(input_ids=ids, labels=labels).loss,
    llama=lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False)).train(),
)
LAYERS: dict[str, dict[str, Any]] = {
    "half recomputed": {"activation_checkpointing": 0.5},
    "products stored": {"activation_checkpointing": "products"},
    "products, half of their bytes offloaded": {"activation_checkpointing": "products", "activation_offload": 0.5},
    "offloaded": {"activation_offload": True},
}
"""Ways in which the layers of `llama` store their activations."""


def config(precision: str, chunk_size: int | str, **more: Any) -> ps.Config:
    """Return a CPU configuration with AdamW, budgets and other options."""
    optimizer = ps.AdamW(lr=1e-2, weight_decay=0.1)
    return ps.Config(device="cpu", precision=precision, chunk_size=chunk_size, optimizer=optimizer, **more)


class Fixed(ps.testing.NoMeter):
    """Meter of a given amount of non-model data."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes

    def now(self, chunk_bytes: int) -> int:
        return self.nbytes

    peak = now


class Waves(ps.testing.NoMeter):
    """Meter that reports varying non-model data, of at most `peak_bytes` (current amount plus growth)."""

    source = "a simulated wave"

    def __init__(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        self.calls = 0

    def now(self, chunk_bytes: int) -> int:
        self.calls += 1
        return self.peak_bytes * (self.calls % 7) // 12

    def peak(self, chunk_bytes: int) -> int:
        return self.now(chunk_bytes)


def largest_access(build: Any, options: ps.Config, run: Callable[[ps.Engine], Any]) -> int:
    """Return the bytes of chunks that the largest operator of a run accesses together."""
    with ps.Engine(build, options, meter=ps.testing.NoMeter()) as engine:
        sizes = record_accesses(engine)
        run(engine)
    return max(sizes, default=0)


def smallest_device_bytes(shape: Shape, chunk_size: int | str, precision: str) -> int:
    """Return the bytes of chunks that the largest operator accesses together, measured in one step."""
    return largest_access(shape.build, config(precision, chunk_size), lambda engine: train(engine, batches(1)))


def check_alignment(engine: ps.Engine) -> set[tuple[str, str]]:
    """Assert that all parameters start at multiples of 256 bytes in all lists; return these, each with its tier.

    In lists of one byte per element they start at multiples of 128 bytes.
    """
    checked = set()
    chunks = manager_of(engine).chunks
    for managed in shards_of(engine).managed_params:
        for (kind, index), chunk in chunks.items():
            if index != managed.location.chunk or 0 in (managed.numel, managed.location.numel, chunk.numel):
                continue
            offset = managed.region.offset if chunk is managed.chunk else managed.location.offset
            first = Region(offset, (1,), (1,))
            views = {"device": chunk.on_device} if chunk.device.present else {}
            views |= {"host": chunk.on_host} if chunk.host.present else {}
            for tier, view in views.items():
                off = view(first).data_ptr() % min(256, ALIGN_NUMEL * chunk.dtype.itemsize)
                assert off == 0, f"{managed.name} in {chunk} on the {tier}: {off} bytes off"
                checked.add((kind, tier))
    return checked


def check_real_bytes(manager: ChunkManager, *more: Chunk) -> None:
    """Assert that the memory that chunks, and more of them, use, whatever their flags, equals the tiers' counts."""
    chunks, pool = {*manager.chunks.values(), *more}, manager.device_tier.page_pool
    on_device = [chunk for chunk in chunks if chunk.device_bytes]
    assert manager.device_tier.used == sum(chunk.nbytes for chunk in on_device)
    # Each page has one owner, and ranges are whole pages.
    paged = [] if pool is None else [chunk for chunk in chunks if hasattr(chunk.memory, "range")]
    for chunk in paged:
        committed = sum(run.nbytes for run in chunk.memory.range.runs)
        parked = chunk.memory.range in pool._parked
        assert (committed if not parked else 0) == (round_up(chunk.nbytes) if chunk in on_device else 0), f"{chunk}"
    if pool is not None:
        assert pool.mapped_bytes - pool.parked_bytes == sum(round_up(c.nbytes) for c in on_device if c in paged)
        assert pool.mapped_bytes >= pool.parked_bytes >= 0
    for chunk in chunks.difference(paged):
        assert chunk.storage.nbytes() == (chunk.nbytes if chunk in on_device else 0), f"{chunk}"
    (arena,) = manager.host_tier.arenas
    base = arena.memory.data_ptr()
    locations = sorted(
        (start := c.host.memory.data_ptr() - base, start + c.host.memory.nbytes) for c in chunks if c.host_bytes
    )
    assert all(0 <= start <= end <= arena.nbytes for start, end in locations)
    assert sum(end - start for start, end in locations) <= arena.touched_bytes <= round_up(arena.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(locations)), "two chunks share host memory"
    assert manager.host_tier.used == sum(end - start for start, end in locations)
