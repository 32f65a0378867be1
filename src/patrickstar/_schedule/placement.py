"""Placement by bytes: tiers of optimizer chunks and of embedding lookups (PatrickStar §8.2; Angel-PTM §4).

Parameters take precedence over optimizer states: keeping a byte of 16-bit parameters on the device saves more traffic
than a byte of optimizer states. On the host it saves three bytes of disk traffic per step (two reads and one write), a
byte of optimizer states only two.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from patrickstar._layout.chunk_mapping import ChunkSpec

WARM_UP_PERCENT = 80
"""Share of the device budget that chunks may fill during warm-up, when the operators' allocations are not yet known
(the paper's own figure)."""


def cautious_limit_bytes(budget_bytes: int, first: bool, strictly: bool) -> int:
    """Return what chunks and non-model data may use while operators may need more than is known.

    Args:
        budget_bytes: Device budget.
        first: This is the first iteration of all, whose operators may need any part of the budget.
        strictly: What does not fit is out of memory, in the middle of an operator or of backward. So in the first
            iteration no chunk stays that none uses.
    """
    return 0 if first and strictly else budget_bytes * WARM_UP_PERCENT // 100


DISK_BLOCK_BYTES = 4096
"""Allocation unit of the swap file."""


class Tier(Enum):
    """Storage tier: device memory, host memory or disk."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class ChunkTiers:
    """Initial tiers of the chunks of one index."""

    compute: Tier
    optimizer: Tier


@dataclass(frozen=True)
class Budgets:
    """Bytes available to chunks on each tier; `disk` is 0 without a disk."""

    device: int
    host: int
    disk: int = 0


HOST = ChunkTiers(compute=Tier.HOST, optimizer=Tier.HOST)


def initial_placement(
    chunks: Sequence[ChunkSpec], budgets: Budgets, working_set: int = 0
) -> dict[int, ChunkTiers] | None:
    """Return the initial tiers of each index, using the disk only if memory is too small, or None if nothing fits.

    `working_set` is the number of device bytes that operators need besides chunks that must stay there.
    """
    in_memory = _in_memory(chunks, budgets.device, budgets.host)
    if in_memory is not None:
        resident = sum(chunk.optimizer_bytes for chunk in chunks if in_memory[chunk.index].optimizer is Tier.DEVICE)
        gradients = max(chunk.nbytes(chunk.schema.gradient_itemsize(False)) for chunk in chunks) if resident else 0
        if resident + gradients + working_set <= budgets.device:
            return in_memory
    return _with_disk(chunks, budgets) if budgets.disk and working_set <= budgets.device else None


def _with_disk(chunks: Sequence[ChunkSpec], budgets: Budgets) -> dict[int, ChunkTiers] | None:
    """Return the initial tiers of each index if the disk stores what memory can't.

    Every `param16` chunk is created on the device, a shard of one on the host; while there is room they are evicted to
    the host, otherwise to the disk.
    At first the whole host is reserved for them. The first step shows how much they need; the rest is then given to
    optimizer chunks (`home_tiers`).
    """
    param16 = sum(chunk.evictable_bytes + chunk.shard_bytes for chunk in chunks)
    room = budgets.host - param16 - largest_shard_bytes(chunks)
    placement = {}
    for chunk in chunks:
        on_host = chunk.schema.trained and chunk.optimizer_bytes <= room
        room -= chunk.optimizer_bytes if on_host else 0
        placement[chunk.index] = ChunkTiers(Tier.DEVICE, Tier.HOST if on_host else Tier.DISK)
    enough = disk_bytes(chunks, placement) <= budgets.disk and least_shard_bytes(chunks) <= budgets.host
    return placement if enough and max(chunk.compute_bytes for chunk in chunks) <= budgets.device else None


def largest_shard_bytes(chunks: Sequence[ChunkSpec]) -> int:
    """Return the bytes of the largest shard of `param16`: beside a disk the host always has room for one."""
    return max(chunk.nbytes(chunk.schema.compute.itemsize) if chunk.sharded else 0 for chunk in chunks)


def least_shard_bytes(chunks: Sequence[ChunkSpec]) -> int:
    """Return the host bytes that shards of `param16` need beside a disk: one at a time, and all of `node16`."""
    return largest_shard_bytes(chunks) + sum(chunk.node_numel * chunk.schema.compute.itemsize for chunk in chunks)


def disk_bytes(chunks: Sequence[ChunkSpec], placement: Mapping[int, ChunkTiers]) -> int:
    """Return the disk bytes of optimizer chunks placed there and of `param16`, all of which may be evicted there."""
    blocks = 0
    for chunk in chunks:
        lists = chunk.schema.lists if placement[chunk.index].optimizer is Tier.DISK else chunk.schema.lists[:1]
        blocks += sum(-(-chunk.own_numel * spec.itemsize // DISK_BLOCK_BYTES) for spec in lists)
    return blocks * DISK_BLOCK_BYTES


def _in_memory(
    chunks: Sequence[ChunkSpec], device_budget_bytes: int, host_budget_bytes: int
) -> dict[int, ChunkTiers] | None:
    """Return the initial tiers of each index if device and host hold everything, or None if they can't.

    The host takes as many optimizer chunks as fit beside the part of `param16` that the device can't hold and the
    exchange space. The other optimizer chunks stay on the device, and `param16` gets the rest of it: at most the
    warm-up share if the host can hold the remaining `param16` chunks.
    """
    param16 = sum(chunk.evictable_bytes for chunk in chunks)
    largest = max(chunk.compute_bytes for chunk in chunks)
    # Space for the excess of evicting whole chunks and for the chunk being fetched: if both are free on some tier, no
    # order of evictions deadlocks. Neither does any if the host can hold all of `param16`.
    exchange = 2 * max(chunk.evictable_bytes for chunk in chunks)
    on_host_bytes = sum(chunk.optimizer_bytes + chunk.shard_bytes for chunk in chunks)
    bound_to_device: set[int] = set()
    bound_bytes = 0
    candidates = [chunk for chunk in chunks if chunk.schema.trained]
    while True:
        spill = max(0, param16 - max(0, device_budget_bytes - bound_bytes))
        if on_host_bytes + min(param16, spill + (exchange if on_host_bytes or spill else 0)) <= host_budget_bytes:
            break
        if not candidates:
            return None
        chunk = candidates.pop(0)
        bound_to_device.add(chunk.index)
        bound_bytes += chunk.optimizer_bytes
        on_host_bytes -= chunk.optimizer_bytes
    if bound_bytes + largest > device_budget_bytes:
        return None
    for share in (WARM_UP_PERCENT, 100):
        room = device_budget_bytes * share // 100 - bound_bytes
        placement, spilled = {}, 0
        for chunk in chunks:
            on_device = chunk.compute_bytes <= room
            room -= chunk.compute_bytes if on_device else 0
            spilled += 0 if on_device else chunk.evictable_bytes
            compute = Tier.DEVICE if on_device else Tier.HOST
            placement[chunk.index] = ChunkTiers(compute, Tier.DEVICE if chunk.index in bound_to_device else Tier.HOST)
        if on_host_bytes + min(param16, spilled + (exchange if on_host_bytes or spilled else 0)) <= host_budget_bytes:
            return placement
    return None


def margin_chunks(
    chunks: Sequence[ChunkSpec],
    chunkable_bytes: int,
    *,
    gathered_bytes: int | None = None,
    bound_to_device: Collection[int] = (),
    on_host: Collection[int] = (),
    accumulates: bool = False,
) -> list[int]:
    """Return the indices whose optimizer chunks are placed on the device: `bound_to_device`, then others in list order.

    Those of `on_host` are not, unless they are bound.

    The margin is the part of `chunkable_bytes` (budget minus peak non-model data and workspace of the update) that
    remains when all of `param16` is on the device; of chunks that are sharded only `gathered_bytes`. If that does not
    fit, there is no margin. With gradient accumulation, the gradient list is placed with the optimizer chunks.
    """
    gathered = sum(chunk.compute_bytes for chunk in chunks if chunk.sharded)
    margin = chunkable_bytes - sum(chunk.evictable_bytes for chunk in chunks)
    margin -= gathered if gathered_bytes is None else min(gathered, gathered_bytes)
    placed = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.index not in bound_to_device):
        nbytes = chunk.optimizer_bytes
        if chunk.sharded:  # a shard follows its states
            nbytes += chunk.own_numel * chunk.schema.compute.itemsize
        if accumulates:
            nbytes += chunk.nbytes(chunk.schema.gradient_itemsize(accumulates))
        fits = chunk.index not in on_host and nbytes <= margin
        if chunk.schema.trained and (chunk.index in bound_to_device or fits):
            placed.append(chunk.index)
            margin -= nbytes
    return placed


GOLDEN_SECTION = (5**0.5 - 1) / 2
"""Multiples of it, modulo one, are spread evenly over the interval, however many there are."""


def home_tiers(
    chunks: Sequence[ChunkSpec], on_device: Collection[int], host_bytes: int, *, accumulates: bool = False
) -> dict[int, Tier]:
    """Return the tier of each index's optimizer chunks: margin, then host up to `host_bytes`, then disk.

    Those on the host are spread over the list. Forward waits for the updates of its operators in list order: the host
    updates some while the disk reads and writes others. Which chunks are preferred does not depend on `host_bytes`, so
    that few move when it changes. The same chunks stay on the host in every step. Caching by recent use would have no
    hits in a sweep over more chunks than the host holds. A sweep that reverses its direction would save the same bytes,
    but backward and forward determine the order.
    """
    tiers = {chunk.index: Tier.DEVICE if chunk.index in on_device else Tier.DISK for chunk in chunks}
    for position in sorted(range(len(chunks)), key=lambda position: position * GOLDEN_SECTION % 1):
        chunk = chunks[position]
        nbytes = chunk.optimizer_bytes
        if accumulates:
            nbytes += chunk.nbytes(chunk.schema.gradient_itemsize(accumulates))
        if tiers[chunk.index] is Tier.DISK and nbytes <= host_bytes:
            tiers[chunk.index] = Tier.HOST
            host_bytes -= nbytes
    return tiers


SMALL_COPY_BYTES = 1 << 16
"""Bytes whose copy between host and device takes no longer than its start."""


def embedding_runs_on_host(chunk_bytes_moved: int, activation_bytes: int) -> bool:
    """Return True if running an embedding lookup on the host, where its weight is, transfers fewer bytes.

    `chunk_bytes_moved` counts its chunk's transfers of the traced iteration in both directions. `activation_bytes` is
    the size of its output, which counts twice because the gradient is transferred back.
    """
    return 2 * activation_bytes < chunk_bytes_moved
