"""Planning of an engine's tiers: budgets, initial placement, swap file and staging buffers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from patrickstar._hardware.direct_io import BLOCK_BYTES, PAGE_BYTES
from patrickstar._hardware.vm_pool import round_up
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._kernels.update_rule import Rule
from patrickstar._layout.byte_size import format_size
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._schedule.feasibility import check_budgets, check_together, working_set_bytes
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION, Fragmentation
from patrickstar._schedule.placement import Budgets, ChunkTiers, Tier, disk_bytes, initial_placement, least_shard_bytes
from patrickstar._step.staging_pool import StagingSize
from patrickstar._step.streamed_update import PIECE_NUMEL, buffer_bytes, buffer_count
from patrickstar._tiers.disk_tier import STAGES, DiskTier, stage_pages
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_arena import ALIGN_BYTES
from patrickstar._tiers.page_codec import PageCodec
from patrickstar.config import Config, Delayed
from patrickstar.errors import BudgetError, ConfigError

MASTER_BYTES = 4
"""Bytes per element of a master parameter, unless it is float64."""


@dataclass(frozen=True)
class TierPlan:
    """Initial placement of chunks, and the disk tier if there is one."""

    placement: dict[int, ChunkTiers]
    disk: DiskTier | None = None
    staging_size: StagingSize | None = None
    """Staging buffers of the optimizer step of chunks on disk."""
    buffer_bytes: int = 0
    """Host memory of the buffers of updates beside an accelerator."""
    staging_bytes: int = 0
    """Host memory of all buffers, also for disk I/O."""


def budgets(config: Config, hardware: Hardware, sharing: int = 1, several: bool = False) -> tuple[int, int]:
    """Return the device and host budgets in bytes, as `find_budgets`.

    Budgets beyond the available memory are warned of, since the system would end the process where a budget would be
    kept.
    """
    device_memory, host_memory = find_budgets(config, hardware, sharing, several)
    processes = _processes(sharing)
    if hardware.has_gpu:
        hardware.warn_beyond_ram(host_memory * sharing, f"host_memory{processes}")
    else:
        nbytes = (device_memory + host_memory) * sharing
        hardware.warn_beyond_ram(nbytes, f"device_memory and host_memory{processes} together")
    return device_memory, host_memory


def _processes(sharing: int) -> str:
    return f" of the {sharing} processes of this machine" if sharing > 1 else ""


def find_budgets(config: Config, hardware: Hardware, sharing: int = 1, several: bool = False) -> tuple[int, int]:
    """Return the device and host budgets in bytes.

    A missing budget in the RAM is what others leave of it: see [Note: default budgets]. On a CPU both budgets share the
    RAM: one missing budget is that beside the other, two are half of it each.

    Args:
        sharing: Number of processes that share this machine's RAM evenly. A GPU belongs to one process.
        several: Whether more than one process trains, on any number of machines.

    Raises:
        BudgetError: One budget leaves nothing of the RAM for the other.
    """
    device_memory = int(config.device_memory) if config.device_memory is not None else None
    host_memory = int(config.host_memory) // sharing if config.host_memory is not None else None
    if hardware.has_gpu:
        return device_memory or hardware.device_bytes(several), host_memory or hardware.host_bytes() // sharing
    if device_memory is None and host_memory is None:
        ram = hardware.host_bytes() // sharing
        device_memory, host_memory = ram // 2, ram - ram // 2
    if device_memory is None or host_memory is None:
        given, missing = ("host_memory", "device_memory") if device_memory is None else ("device_memory", "host_memory")
        nbytes = (device_memory or host_memory or 0) * sharing
        rest = hardware.host_bytes(nbytes) // sharing
        if not rest:
            available = hardware.host_bytes()
            raise BudgetError(
                f"{given}{_processes(sharing)} is {nbytes} bytes ({format_size(nbytes)}), and of the {available} bytes "
                f"({format_size(available)}) of memory that budgets take here by default nothing is left for "
                f"{missing}: lower {given}, or set both"
            )
        device_memory, host_memory = (rest, host_memory) if host_memory is not None else (device_memory, rest)
    assert device_memory is not None and host_memory is not None
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
    fragmentation: Fragmentation = NO_FRAGMENTATION,
) -> TierPlan:
    """Plan the initial placement, and create the swap file if a disk is configured and a step may need it.

    Args:
        memory: Device and host budgets in bytes.
        sharing: Number of processes that share the disk.
        library_bytes: Part of the device budget that the device's libraries use, and that is left to fragmentation.
        fragmentation: Fragmentation on the device.

    Raises:
        BudgetError: All tiers together are too small.
        DiskError: The directory can't be used.
    """
    rules = config.optimizer.default_rules()
    by_pages = all(rule.by_pages for rule in rules)
    buffers = _update_buffer_bytes(layout, rules) if hardware.has_gpu else 0
    libraries = library_bytes - fragmentation.unplanned_bytes(memory[0])
    check = partial(check_budgets, layout, together, device_memory=memory[0], fragmentation=fragmentation)
    optimizer = config.optimizer
    # On the host; all at once if parameters are updated together.
    gradients = layout.gradient_list_bytes if optimizer.updates_together else layout.gradient_room_bytes
    device, host = memory[0] - library_bytes, memory[1] - buffers - layout.buffer_bytes - gradients
    update_bytes = _update_bytes(layout, rules)
    working_set = max(working_set_bytes(layout, together), update_bytes)
    if optimizer.updates_together and config.disk is None:
        check_together(layout, Budgets(device, host), gradients, buffers, optimizer.name)
    in_memory = initial_placement(layout.chunks, Budgets(device, host), working_set)
    if optimizer.updates_together and any(tiers.optimizer is not Tier.HOST for tiers in (in_memory or {}).values()):
        in_memory = None
    free = hardware.free_disk_bytes(Path(config.disk.directory)) // sharing if config.disk is not None else 0
    # Activations may leave no chunk on the device: only what the host holds alone never needs the disk.
    if config.disk is None or (in_memory is not None and layout.model_data_bytes <= host):
        check(Budgets(device, host), buffers + gradients, libraries, update_bytes)
        assert in_memory is not None, "budgets were checked"
        return TierPlan(in_memory, buffer_bytes=buffers, staging_bytes=buffers)
    directory = Path(config.disk.directory)
    capacity = int(config.disk.capacity) // sharing if config.disk.capacity is not None else None
    # Frozen parameters may be unfrozen later, and then get master parameters in chunks of the same size.
    numel = max(layout.chunk_numel, *(chunk.own_numel for chunk in layout.chunks))
    largest = numel * max(MASTER_BYTES, *(spec.itemsize for chunk in layout.chunks for spec in chunk.schema.lists))
    page_bytes = min(page_bytes, round_up(largest))
    # Pages of the narrowest list that an update reads are whole blocks too.
    trained = [chunk for chunk in layout.chunks if chunk.schema.trained]
    itemsizes = (spec.itemsize for chunk in trained for spec in chunk.schema.lists[not chunk.sharded :])
    narrowest = min(itemsizes, default=MASTER_BYTES)
    page_bytes = max(page_bytes, MASTER_BYTES // narrowest * BLOCK_BYTES)
    io_bytes = page_bytes * (STAGES * stage_pages(config.disk.packed, hardware.has_gpu) + 1)
    if config.reduce_dtype == "fp32":  # a sum of gradients, before it is added to its list on disk
        io_bytes += max(chunk.own_numel * MASTER_BYTES * chunk.sharded for chunk in layout.chunks)
    # Master and gradient list, beside the optimizer states, and the shard of the parameters.
    lists = 2 + len(config.optimizer.states) + isinstance(config.update, Delayed) + layout.chunks[0].sharded
    room = host - io_bytes - least_shard_bytes(layout.chunks)
    uncut = {rule.kinds for rule in rules if not rule.by_pages}
    whole = [chunk for chunk in trained if chunk.schema.state_kinds in uncut]
    whole_bytes = max((chunk.own_numel * MASTER_BYTES for chunk in whole), default=0)
    uncut_bytes = None if by_pages else whole_bytes
    staging_size = StagingSize.choose(lists, largest, page_bytes, uncut_bytes, room, hardware.has_gpu)
    staging = buffers + io_bytes + staging_size.nbytes
    versions = 1 + config.disk.durable  # of each page: that of the last checkpoint, and the newest
    disk_room = (capacity if capacity is not None else free) // versions
    budget = Budgets(device, host + buffers - staging, disk_room)
    if optimizer.updates_together:
        check_together(layout, budget, gradients, staging, optimizer.name)
    check(budget, staging + gradients, libraries, update_bytes, with_disk=True)
    placement = initial_placement(layout.chunks, budget, working_set)
    assert placement is not None, "budgets were checked"
    nbytes = disk_bytes(layout.chunks, placement) * versions
    codec = _codec() if config.disk.packed else None
    file = hardware.swap_file(directory, nbytes, config.disk.checksums, capacity, config.disk.durable)
    disk = hardware.disk(file, page_bytes, codec)
    return TierPlan(placement, disk, staging_size, buffers, staging)


def _codec() -> PageCodec:
    """Return the codec of packed pages. Raises ConfigError if the C++ kernel can't be used."""
    try:
        return CppBackend.load().codec
    except Unavailable as error:
        raise ConfigError(f"ps.Disk(packed=True) needs the C++ kernel. {error}") from error


def _update_bytes(layout: Layout, rules: Sequence[Rule]) -> int:
    """Return the bytes on the device for the largest update of a whole parameter: its chunk, and the workspace."""
    items = {rule.kinds: rule.workspace_items for rule in rules if rule.needs_shape}
    return max(
        (
            chunk.compute_bytes + items[chunk.schema.state_kinds] * MASTER_BYTES * layout.locations[name].numel
            for chunk in layout.chunks
            if chunk.schema.trained and chunk.schema.state_kinds in items
            for name in chunk.params
        ),
        default=0,
    )


def _update_buffer_bytes(layout: Layout, rules: Sequence[Rule]) -> int:
    """Return the bytes of the buffers for updates of parameters on the device whose masters are on the host.

    They hold the largest parameter whose update can't be cut, if there is one, and pieces of others.
    """
    uncut = {rule.kinds for rule in rules if not rule.by_pages}
    whole_numel = cut_numel = 0
    for chunk in layout.chunks:
        if chunk.schema.trained:
            numel = max((layout.locations[name].numel for name in chunk.params), default=0)
            if chunk.schema.state_kinds in uncut:
                whole_numel = max(whole_numel, numel)
            else:
                cut_numel = max(cut_numel, numel)
    itemsize = max((chunk.schema.lists[0].itemsize for chunk in layout.chunks), default=0)
    by_pages = not uncut
    numel = cut_numel if by_pages else max(whole_numel, min(PIECE_NUMEL, cut_numel))
    return round_up(buffer_bytes(numel, itemsize, by_pages), buffer_count(by_pages) * ALIGN_BYTES)


def optimizer_room_bytes(layout: Layout, host_bytes: int, device_param_bytes: int, on_host: Collection[int]) -> int:
    """Return the host bytes left for optimizer chunks beside the `param16` chunks that do not fit on the device.

    `on_host` holds indices of `param16` chunks that stay on the host, where their embedding lookups run.
    """
    resident = sum(chunk.compute_bytes for chunk in layout.chunks if chunk.index in on_host)
    resident += layout.buffer_bytes + layout.gradient_room_bytes + sum(chunk.shard_bytes for chunk in layout.chunks)
    evictable = [chunk.evictable_bytes for chunk in layout.chunks if chunk.index not in on_host]
    spilled = sum(evictable) - device_param_bytes
    return host_bytes - resident - (min(sum(evictable), spilled + max(evictable)) if spilled > 0 else 0)
