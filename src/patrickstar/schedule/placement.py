"""What the bytes decide: which optimizer chunks live on the device, and where an embedding runs (§8.2).

Parameters come before optimizer states: a byte of 16-bit parameters kept on the device saves more traffic than a
byte of optimizer states does.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from patrickstar.layout.lists import ITEMSIZE
from patrickstar.layout.mapping import ChunkSpec

WARM_UP_PERCENT = 80
"""The share of the device budget that the warm-up may fill, since what an operator will allocate is not yet known
(the paper's own figure)."""


@dataclass(frozen=True)
class Tiers:
    """Where the chunks of one index begin their life."""

    compute_on_device: bool
    optimizer_on_device: bool


HOST = Tiers(compute_on_device=False, optimizer_on_device=False)


def initial_placement(
    chunks: Sequence[ChunkSpec], device_budget_bytes: int, host_budget_bytes: int
) -> dict[int, Tiers] | None:
    """Where each index begins; None if the tiers are too small together.

    Optimizer chunks begin on the host, as many as it has room for beside the part of `param16` that the device can't
    hold and beside what changes places. The others live on the device, and `param16` has what they leave:
    while the host can take the rest, no more than the warm-up may fill.
    """
    param16 = sum(chunk.compute_bytes for chunk in chunks)
    largest = max(chunk.compute_bytes for chunk in chunks)
    # What evicting whole chunks can overshoot by, and the chunk that comes: with both free somewhere, no order of
    # evictions gets stuck. Nor does any where the host can take all of `param16`.
    exchange = 2 * largest
    below = sum(chunk.optimizer_bytes for chunk in chunks)
    above: set[int] = set()
    forced = 0
    waiting = [chunk for chunk in chunks if chunk.scheme.trained]
    while True:
        spill = max(0, param16 - max(0, device_budget_bytes - forced))
        if below + min(param16, spill + (exchange if below or spill else 0)) <= host_budget_bytes:
            break
        if not waiting:
            return None
        chunk = waiting.pop(0)
        above.add(chunk.index)
        forced += chunk.optimizer_bytes
        below -= chunk.optimizer_bytes
    if forced + largest > device_budget_bytes:
        return None
    for share in (WARM_UP_PERCENT, 100):
        room = device_budget_bytes * share // 100 - forced
        placement, spilled = {}, 0
        for chunk in chunks:
            stays = chunk.compute_bytes <= room
            room -= chunk.compute_bytes if stays else 0
            spilled += 0 if stays else chunk.compute_bytes
            placement[chunk.index] = Tiers(stays, chunk.index in above)
        if below + min(param16, spilled + (exchange if below or spilled else 0)) <= host_budget_bytes:
            return placement
    return None


def margin_chunks(
    chunks: Sequence[ChunkSpec], chunkable_bytes: int, *, stuck: Collection[int] = (), accumulates: bool = False
) -> list[int]:
    """The chunk indices whose optimizer chunks live on the device: those `stuck` there, then others in list order.

    The margin space is what the peak of non-model data, and the update's workspace, leave of the budget
    (`chunkable_bytes`) once all of `param16` is there. Where not even that fits there is no margin: every byte serves
    parameters. With accumulation the gradient list lies beside the optimizer chunks.
    """
    margin = chunkable_bytes - sum(chunk.compute_bytes for chunk in chunks)
    placed = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.index not in stuck):
        nbytes = chunk.optimizer_bytes
        if accumulates:
            nbytes += chunk.nbytes(ITEMSIZE[chunk.scheme.master_dtype])
        if chunk.scheme.trained and (chunk.index in stuck or nbytes <= margin):
            placed.append(chunk.index)
            margin -= nbytes
    return placed


def embedding_runs_on_host(chunk_bytes_moved: int, activation_bytes: int) -> bool:
    """Whether an embedding moves fewer bytes when its lookup runs where its weight lies, on the host.

    `chunk_bytes_moved`: what the traced iteration moved of its chunk, both directions. `activation_bytes`: its output;
    the gradient of the output goes the other way, hence twice.
    """
    return 2 * activation_bytes < chunk_bytes_moved
