"""Snapshot of an engine: where each chunk and parameter is stored, and what the tiers hold."""

from dataclasses import dataclass
from pathlib import Path

from patrickstar._engine.core import EngineCore
from patrickstar._engine.durable_interval import durable_every
from patrickstar._layout.schema import PARAM16
from patrickstar._params.managed_param import ManagedParam
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.tensor_state import chunk_state
from patrickstar._tiers.chunk import Chunk


@dataclass(frozen=True)
class TierUsage:
    """Use of device or host memory, in bytes."""

    budget_bytes: int
    chunk_bytes: int
    """Bytes allocated to chunks."""
    other_bytes: int
    """Device: last measured non-model data. Host: offloaded activations and buffers of disk transfers."""
    resident_bytes: int
    """Memory taken from the system, with freed pages that are kept for reuse; on a GPU chunks alone."""


@dataclass(frozen=True)
class DiskUsage:
    """The swap file, of which `used_bytes` have been allocated to chunks. Both sizes are 0 on a closed engine."""

    path: Path
    """Path at which the file was created; it is unlinked at once."""
    nbytes: int
    used_bytes: int


@dataclass(frozen=True)
class ChunkInfo:
    """One chunk of one chunk list (`kind`: param16, param32, grad32, or an optimizer state such as exp_avg)."""

    kind: str
    index: int
    dtype: str
    nbytes: int
    tiers: tuple[str, ...]
    """Tiers with an up to date copy: "device", "host", "disk"."""
    pins: int
    """Number of running accesses and updates, and 1 in a resident iteration; a pinned chunk is not evicted."""
    state: str | None
    """State of a `param16` chunk, which follows from its parameters' tensor states (PatrickStar, Table 1)."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter. With several processes, offset, numel and gradient are those of this rank's shard."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Compute dtype."""
    trained: bool
    """False if the parameter is frozen."""
    chunk: int
    """Index of its chunk in every chunk list."""
    offset: int
    """First element in the chunk."""
    numel: int
    """Number of elements in the chunk."""
    state: str
    """Tensor state: FREE, HOLD, COMPUTE, HOLD_AFTER_FWD or HOLD_AFTER_BWD."""
    uses: int
    """Number of running accesses."""
    has_gradient: bool
    """True if a gradient waits for the next step."""
    update_pending: bool
    """True if an update from disk of an earlier step is unfinished."""
    steps: int
    """Number of updates."""
    optimizer_tier: str | None
    """Tier where master parameter and optimizer states are stored between steps; None if frozen."""
    lookup_tier: str | None
    """Tier where embedding lookups read it; None if there are none. Other operators read it on the device."""


@dataclass(frozen=True)
class MomentInfo:
    """Interval between two operator boundaries: chunks accessed at its start, peak of non-model data in bytes."""

    chunks: tuple[int, ...]
    non_model_bytes: int


@dataclass(frozen=True)
class Inspection:
    """Snapshot of an engine, as plain data. A closed engine has no chunks and no parameters."""

    device: TierUsage
    host: TierUsage
    disk: DiskUsage | None
    """None without a disk tier, also if `config.disk` is set and everything fits in memory."""
    chunks: tuple[ChunkInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    """In creation order."""
    trace: tuple[MomentInfo, ...]
    """Trace that the last iteration recorded or followed."""
    loss_scale: float
    """Current loss scale; 1.0 without fp16."""
    keeps_duplicates: bool
    """True if a chunk fetched to the device keeps its host copy."""
    window_open: bool
    """True while backward has pinned the parameters of an operator."""
    h2d_bytes: int
    """Bytes copied to the device since the engine was created; the next three are counted alike."""
    d2h_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    durable_every: int
    """Steps between checkpoints by reference for which these write at most 3 % of what the steps write."""


def inspect(core: EngineCore) -> Inspection:
    """Read the state of an engine, when no other thread uses it."""
    with core.interceptor.lock:
        return _inspect(core)


def _inspect(core: EngineCore) -> Inspection:
    manager, closed = core.manager, core.shards.closed
    device, host, counters = manager.device_tier, manager.host_tier, manager.counters
    file = None if manager.disk_tier is None else manager.disk_tier.file
    return Inspection(
        TierUsage(device.budget_bytes, device.used, device.non_model_bytes, device.resident_bytes),
        TierUsage(host.budget_bytes, host.used, host.other_bytes, host.touched_bytes),
        None if file is None else DiskUsage(file.path, *((0, 0) if closed else (file.nbytes, file.used_bytes))),
        tuple(_chunk_info(chunk, core) for chunk in manager.chunks.values()),
        () if closed else tuple(_parameter_info(managed, core) for managed in core.shards.managed_params),
        tuple(MomentInfo(moment.chunks, moment.non_model_bytes) for moment in core.tracer.trace.moments),
        core.scaler.scale,
        manager.transfers.keep_duplicates,
        core.interceptor.window is not None,
        *(counters.h2d_bytes, counters.d2h_bytes, counters.disk_read_bytes, counters.disk_write_bytes),
        1 if closed else durable_every(core),
    )


def _chunk_info(chunk: Chunk, core: EngineCore) -> ChunkInfo:
    valid = {"device": chunk.device.valid, "host": chunk.host.valid, "disk": chunk.disk.valid}
    tiers = tuple(tier for tier, is_valid in valid.items() if is_valid)
    state = None
    if chunk.kind == PARAM16:
        state = chunk_state(managed.state.tensor for managed in core.shards.by_chunk[chunk.index]).name
    return ChunkInfo(chunk.kind, chunk.index, str(chunk.dtype).split(".")[-1], chunk.nbytes, tiers, chunk.pins, state)


def _parameter_info(managed: ManagedParam, core: EngineCore) -> ParameterInfo:
    home = core.optimizer_step.tiers.home.get(managed.location.chunk, Tier.HOST)
    return ParameterInfo(
        managed.name,
        managed.shape,
        managed.schema.compute.dtype,
        managed.schema.trained,
        managed.location.chunk,
        managed.location.offset,
        managed.location.numel,
        managed.state.tensor.name,
        managed.state.uses,
        managed.has_gradient,
        managed.state.update_pending,
        managed.steps,
        home.value if managed.schema.trained else None,
        (Tier.HOST if managed.on_host else Tier.DEVICE).value if managed.embedding else None,
    )
