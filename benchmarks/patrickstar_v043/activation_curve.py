"""Non-model data on a GPU over a step (PatrickStar §8.1), and the evictions and fetches that it causes."""

from collections.abc import Sequence
from dataclasses import dataclass

from papers.counts import checkpoint_bytes, saved_bytes, score_numel

from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.workload import HALF

GRADIENT_BYTES_PER_HIDDEN = 2 * 4 * HALF
"""Bytes per token and hidden unit of the 16-bit gradients before and after the GELU, four times as wide."""


@dataclass(frozen=True)
class ChunkTransfers:
    """Numbers of `param16` chunks fetched and evicted in a step of one process, and the chunks held at its end."""

    fetched: int
    evicted: int
    held: frozenset[int]


def non_model_bytes(gpt: Gpt, batch: int, chunks: int) -> list[int]:
    """Return the non-model bytes on a GPU at each chunk use: forward in order, then backward in reverse.

    Checkpoints grow in forward and shrink in backward; one layer's saved tensors and gradients are added. `batch`:
    sequences on this GPU.
    """
    gradients = GRADIENT_BYTES_PER_HIDDEN * batch * gpt.sequence * gpt.hidden
    # Forward builds no graph, so only the tensors of one operator are alive: the widest, or two tensors of scores.
    forward = max(gradients, 2 * HALF * score_numel(gpt, batch))
    backward = saved_bytes(gpt, batch) + gradients
    checkpoints = [checkpoint_bytes(gpt, batch, -(-gpt.layers * (index + 1) // chunks)) for index in range(chunks)]
    rising = [nbytes + forward for nbytes in checkpoints]
    falling = [nbytes + backward for nbytes in reversed(checkpoints)]
    falling[0] = max(falling[0], checkpoints[-1] + gpt.logit_bytes(batch))
    return rising + falling


def simulate_transfers(capacities: Sequence[int], chunks: int) -> ChunkTransfers:
    """Simulate evictions with a capacity in chunks at each use; every chunk is used once forward, once backward.

    The result is that of the second iteration. The chunk with the furthest next use is evicted first, and always
    written back, because the original keeps no clean copies.
    """
    order = [*range(chunks), *reversed(range(chunks))]
    held: set[int] = set()
    for _ in range(2):
        fetched = evicted = 0
        for now, chunk in enumerate(order):
            if chunk not in held:
                held.add(chunk)
                fetched += 1
            while len(held) > capacities[now]:
                held.remove(max(held - {chunk}, key=lambda other: _next_use(other, now, chunks)))
                evicted += 1
    return ChunkTransfers(fetched, evicted, frozenset(held))


def _next_use(chunk: int, now: int, chunks: int) -> int:
    forward, backward = chunk, 2 * chunks - 1 - chunk
    if now < forward:
        return forward
    return backward if now < backward else 2 * chunks + forward
