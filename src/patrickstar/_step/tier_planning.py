"""The tiers of one engine: their budgets, and the scratch file of the one on disk."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from patrickstar._layout.chunk_mapping import Layout
from patrickstar._memory.disk_tier import STAGES, DiskTier
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.swap_file import PAGE_BYTES
from patrickstar._memory.vm_pool import round_up
from patrickstar._schedule.feasibility import check_budgets, working_set_bytes
from patrickstar._schedule.placement import Budgets, ChunkTiers, disk_bytes, initial_placement
from patrickstar._step.staging_pool import StagingSize
from patrickstar.config import Config

MASTER_BYTES = 4
"""Bytes of an element of a master, but for float64's."""


@dataclass(frozen=True)
class TierPlan:
    """Where chunks begin, and what lies below memory."""

    placement: dict[int, ChunkTiers]
    disk: DiskTier | None = None
    staging_size: StagingSize | None = None
    """The pages that updates of what is on disk pass through."""
    staging_bytes: int = 0
    """Host memory that pages on their way take."""


def budgets(config: Config, hardware: Hardware, sharing: int = 1, several: bool = False) -> tuple[int, int]:
    """The bytes of device and host. On a CPU they share one RAM: what one is not given is the other's, or half each.

    sharing: how many processes share this machine's RAM; each has its own device, but for a CPU. several: whether more
    than one process trains, on whatever machines.
    """
    device_memory = int(config.device_memory) if config.device_memory is not None else None
    host_memory = int(config.host_memory) // sharing if config.host_memory is not None else None
    ram = hardware.host_bytes() // sharing
    if hardware.has_gpu:
        return device_memory or hardware.device_bytes(several), host_memory or ram
    if device_memory is None:
        device_memory = ram // 2 if host_memory is None else max(0, ram - host_memory)
    if host_memory is None:
        host_memory = max(0, ram - device_memory)
    return device_memory, host_memory


def plan_tiers(
    config: Config,
    layout: Layout,
    together: Sequence[set[str]],
    memory: tuple[int, int],
    hardware: Hardware,
    page_bytes: int = PAGE_BYTES,
    sharing: int = 1,
    library_bytes: int = 0,
) -> TierPlan:
    """Decide where chunks begin, and make the scratch file if memory can't hold them and a disk may be used.

    memory: budgets of device and host. sharing: how many processes share the disk. library_bytes: what the device's
    libraries keep of its budget. Raises BudgetError when all tiers together are too small, DiskError when the directory
    can't be used.
    """
    device, host = memory[0] - library_bytes, memory[1]
    working_set = working_set_bytes(layout, together)
    in_memory = initial_placement(layout.chunks, Budgets(device, host), working_set)
    free = hardware.free_disk_bytes(Path(config.disk.directory)) // sharing if config.disk is not None else 0
    if config.disk is None or in_memory is not None:
        check_budgets(layout, together, Budgets(device, host), library_bytes=library_bytes)
        assert in_memory is not None, "budgets were checked"
        return TierPlan(in_memory)
    folder = Path(config.disk.directory)
    capacity = int(config.disk.capacity) // sharing if config.disk.capacity is not None else None
    # Frozen parameters may be unfrozen: then they get masters, in chunks as large as others.
    numel = max(layout.chunk_numel, *(chunk.own_numel for chunk in layout.chunks))
    largest = numel * max(MASTER_BYTES, *(spec.itemsize for chunk in layout.chunks for spec in chunk.schema.lists))
    page_bytes = min(page_bytes, round_up(largest))
    pages_bytes = page_bytes * (STAGES + 1)
    rule = config.optimizer.rule(config.optimizer.defaults(), 1, {})
    # The lists of a trained parameter, and that of accumulated gradients.
    lists = 2 + len(config.optimizer.states)
    room = host - pages_bytes - sum(chunk.shard_bytes for chunk in layout.chunks)
    ring = StagingSize.suited(lists, largest, page_bytes, rule.by_pages, room)
    staging = pages_bytes + ring.nbytes
    budget = Budgets(device, host - staging, capacity if capacity is not None else free)
    check_budgets(layout, together, budget, staging, library_bytes)
    placement = initial_placement(layout.chunks, budget, working_set)
    assert placement is not None, "budgets were checked"
    nbytes = disk_bytes(layout.chunks, placement)
    disk = hardware.disk(folder, nbytes, page_bytes, checksums=config.disk.checksums, capacity_bytes=capacity)
    return TierPlan(placement, disk, ring, staging)


def optimizer_room_bytes(layout: Layout, host_bytes: int, device_param_bytes: int, on_host: Collection[int]) -> int:
    """What the host has for optimizer chunks beside the `param16` chunks that the device can't keep.

    on_host: indices of those that stay on the host, whose lookups run there.
    """
    stays = sum(chunk.compute_bytes for chunk in layout.chunks if chunk.index in on_host)
    stays += sum(chunk.shard_bytes for chunk in layout.chunks)
    others = [chunk.evictable_bytes for chunk in layout.chunks if chunk.index not in on_host]
    spilled = sum(others) - device_param_bytes
    return host_bytes - stays - (min(sum(others), spilled + max(others)) if spilled > 0 else 0)
