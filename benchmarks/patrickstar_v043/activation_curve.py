"""The tide: non-model data on a GPU through a step (PatrickStar §8.1), and the chunks that give way and come back."""

from collections.abc import Sequence
from dataclasses import dataclass

from patrickstar._perf_model.gpt_costs import HALF, Gpt

GRADIENT_BYTES_PER_HIDDEN = 2 * 4 * HALF
"""Per token and hidden unit: the gradients before and behind the GELU, four times as wide, in 16 bits."""


@dataclass(frozen=True)
class Moved:
    """Chunks of `param16` that one process fetches and evicts in forward and backward, and those it ends with."""

    fetched: int
    evicted: int
    held: frozenset[int]


def non_model_bytes(gpt: Gpt, batch: int, chunks: int) -> list[int]:
    """Non-model data on a GPU while each chunk is used: forward in order, then backward in reverse.

    Checkpoints grow in forward, and shrink in backward, beside what one layer saves and its gradients. `batch`:
    sequences on this GPU.
    """
    gradients = GRADIENT_BYTES_PER_HIDDEN * batch * gpt.sequence * gpt.hidden
    # Without a graph no more lives in forward than what one operator reads and writes: the widest, or two of scores.
    forward = max(gradients, 2 * HALF * gpt.score_numel(batch))
    backward = gpt.saved_bytes(batch) + gradients
    kept = [gpt.checkpoint_bytes(batch, -(-gpt.layers * (index + 1) // chunks)) for index in range(chunks)]
    rising = [nbytes + forward for nbytes in kept]
    falling = [nbytes + backward for nbytes in reversed(kept)]
    falling[0] = max(falling[0], kept[-1] + gpt.logit_bytes(batch))
    return rising + falling


def move(room: Sequence[int], chunks: int) -> Moved:
    """What moves with room for so many chunks at each access; each is used once forward, once backward.

    Of two iterations the second is told. What is used latest leaves first, and is written whether it changed or not:
    the original keeps no clean copies.
    """
    order = [*range(chunks), *reversed(range(chunks))]
    held: set[int] = set()
    for _ in range(2):
        fetched = evicted = 0
        for now, chunk in enumerate(order):
            if chunk not in held:
                held.add(chunk)
                fetched += 1
            while len(held) > room[now]:
                held.remove(max(held - {chunk}, key=lambda other: _next_use(other, now, chunks)))
                evicted += 1
    return Moved(fetched, evicted, frozenset(held))


def _next_use(chunk: int, now: int, chunks: int) -> int:
    forward, backward = chunk, 2 * chunks - 1 - chunk
    if now < forward:
        return forward
    return backward if now < backward else 2 * chunks + forward
