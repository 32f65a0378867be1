"""What the bytes decide: which tier optimizer chunks live on, and where an embedding runs (§8.2; Angel-PTM §4).

Parameters come before optimizer states: a byte of 16-bit parameters kept on the device saves more traffic than a
byte of optimizer states does. On the host it saves three bytes of a disk's traffic per step, since it is read twice and
written once, and a byte of optimizer states two.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._layout.schema import ITEMSIZE

WARM_UP_PERCENT = 80
"""The share of the device budget that the warm-up may fill, since what an operator will allocate is not yet known
(the paper's own figure)."""

DISK_BLOCK_BYTES = 4096
"""What places on disk are multiples of."""


class Tier(Enum):
    """Where bytes lie: on the device, on the host, or on disk."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class ChunkTiers:
    """Where the chunks of one index begin their life."""

    compute: Tier
    optimizer: Tier


@dataclass(frozen=True)
class Budgets:
    """Bytes that chunks may take on each tier; no disk is a disk of no bytes."""

    device: int
    host: int
    disk: int = 0


HOST = ChunkTiers(compute=Tier.HOST, optimizer=Tier.HOST)


def initial_placement(
    chunks: Sequence[ChunkSpec], budgets: Budgets, working_set: int = 0
) -> dict[int, ChunkTiers] | None:
    """Where each index begins, on disk only if memory can't hold all; None if the tiers are too small together.

    working_set: bytes that operators must find on the device beside what can't leave it.
    """
    in_memory = _in_memory(chunks, budgets.device, budgets.host)
    if in_memory is not None:
        stays = sum(chunk.optimizer_bytes for chunk in chunks if in_memory[chunk.index].optimizer is Tier.DEVICE)
        if stays + working_set <= budgets.device:
            return in_memory
    return _with_disk(chunks, budgets) if budgets.disk and working_set <= budgets.device else None


def _with_disk(chunks: Sequence[ChunkSpec], budgets: Budgets) -> dict[int, ChunkTiers] | None:
    """Where each index begins if the disk takes what memory can't.

    Every chunk of `param16` comes to the device when it is made, and leaves it for the host while that has room, else
    for the disk. The host's room is all theirs at first: how much of it they need shows in the first step, and what
    they leave goes to optimizer chunks then (`home_tiers`).
    """
    param16 = sum(chunk.evictable_bytes for chunk in chunks)
    # What processes own of `param16` is read at every gather, and stays on the host.
    shards = sum(chunk.shard_bytes for chunk in chunks)
    room = budgets.host - param16 - shards
    placement = {}
    for chunk in chunks:
        fits = chunk.schema.trained and chunk.optimizer_bytes <= room
        room -= chunk.optimizer_bytes if fits else 0
        placement[chunk.index] = ChunkTiers(Tier.DEVICE, Tier.HOST if fits else Tier.DISK)
    enough = disk_bytes(chunks, placement) <= budgets.disk and shards <= budgets.host
    return placement if enough and max(chunk.compute_bytes for chunk in chunks) <= budgets.device else None


def disk_bytes(chunks: Sequence[ChunkSpec], placement: Mapping[int, ChunkTiers]) -> int:
    """What has to have room on disk: optimizer chunks that live there, and `param16`, all of which may go there."""
    blocks = 0
    for chunk in chunks:
        lists = chunk.schema.lists if placement[chunk.index].optimizer is Tier.DISK else chunk.schema.lists[:1]
        if chunk.sharded:
            lists = lists[1:]
        blocks += sum(-(-chunk.own_numel * spec.itemsize // DISK_BLOCK_BYTES) for spec in lists)
    return blocks * DISK_BLOCK_BYTES


def _in_memory(
    chunks: Sequence[ChunkSpec], device_budget_bytes: int, host_budget_bytes: int
) -> dict[int, ChunkTiers] | None:
    """Where each index begins if device and host take all of it.

    Optimizer chunks begin on the host, as many as it has room for beside the part of `param16` that the device can't
    hold and beside what changes places. The others live on the device, and `param16` has what they leave:
    while the host can take the rest, no more than the warm-up may fill.
    """
    param16 = sum(chunk.evictable_bytes for chunk in chunks)
    largest = max(chunk.compute_bytes for chunk in chunks)
    # What evicting whole chunks can overshoot by, and the chunk that comes: with both free somewhere, no order of
    # evictions gets stuck. Nor does any where the host can take all of `param16`.
    exchange = 2 * max(chunk.evictable_bytes for chunk in chunks)
    below = sum(chunk.optimizer_bytes + chunk.shard_bytes for chunk in chunks)
    above: set[int] = set()
    forced = 0
    waiting = [chunk for chunk in chunks if chunk.schema.trained]
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
            spilled += 0 if stays else chunk.evictable_bytes
            placement[chunk.index] = ChunkTiers(
                Tier.DEVICE if stays else Tier.HOST, Tier.DEVICE if chunk.index in above else Tier.HOST
            )
        if below + min(param16, spilled + (exchange if below or spilled else 0)) <= host_budget_bytes:
            return placement
    return None


def margin_chunks(
    chunks: Sequence[ChunkSpec],
    chunkable_bytes: int,
    *,
    bound_to_device: Collection[int] = (),
    accumulates: bool = False,
) -> list[int]:
    """The chunk indices whose optimizer chunks live on the device: those `bound_to_device` there, then others in
    list order.

    The margin space is what the peak of non-model data, and the update's workspace, leave of the budget
    (`chunkable_bytes`) once all of `param16` is there. Where not even that fits there is no margin: every byte serves
    parameters. With accumulation the gradient list lies beside the optimizer chunks.
    """
    margin = chunkable_bytes - sum(chunk.compute_bytes for chunk in chunks)
    placed = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.index not in bound_to_device):
        nbytes = chunk.optimizer_bytes
        if accumulates:
            nbytes += chunk.nbytes(ITEMSIZE[chunk.schema.master_dtype])
        if chunk.schema.trained and (chunk.index in bound_to_device or nbytes <= margin):
            placed.append(chunk.index)
            margin -= nbytes
    return placed


def home_tiers(
    chunks: Sequence[ChunkSpec], on_device: Collection[int], host_bytes: int, *, accumulates: bool = False
) -> dict[int, Tier]:
    """Where the optimizer chunks of each index live: in the margin, on the host while `host_bytes` last, else on disk.

    In list order: the first to be used in forward are the last to be complete in backward, so their update has the
    least time in which a disk could hide. What lives on the host is the same part in every step: a sweep over more
    than it holds would find nothing of it the next time, unless it turned round, which saves the same bytes, but can't
    when backward and forward say the order.
    """
    found = {}
    for chunk in chunks:
        nbytes = chunk.optimizer_bytes
        if accumulates and chunk.schema.trained:
            nbytes += chunk.nbytes(ITEMSIZE[chunk.schema.master_dtype])
        if chunk.index in on_device:
            found[chunk.index] = Tier.DEVICE
        elif nbytes <= host_bytes:
            found[chunk.index] = Tier.HOST
            host_bytes -= nbytes
        else:
            found[chunk.index] = Tier.DISK
    return found


def embedding_runs_on_host(chunk_bytes_moved: int, activation_bytes: int) -> bool:
    """Whether an embedding moves fewer bytes when its lookup runs where its weight lies, on the host.

    `chunk_bytes_moved`: what the traced iteration moved of its chunk, both directions. `activation_bytes`: its output;
    the gradient of the output goes the other way, hence twice.
    """
    return 2 * activation_bytes < chunk_bytes_moved
