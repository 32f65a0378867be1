"""Steps between checkpoints that refer to pages on disk, where the rest is written again."""

import math

from patrickstar._checkpoint.save_planner import list_kind, saved_kinds
from patrickstar._engine.core import EngineCore
from patrickstar._schedule.placement import Tier

WRITTEN_SHARE = 0.03
"""What checkpoints of states in memory may write, as a share of what the steps between them write."""


def durable_every(core: EngineCore) -> int:
    """Return after how many steps a checkpoint by reference writes at most `WRITTEN_SHARE` of what the steps have.

    A step writes all states that are on disk, so it takes at least the drive's time for these: checkpoints after so
    many steps take at most that share of the time, whatever the drive. Without states on disk this compares with a
    step that would write all of them.
    """
    in_memory = on_disk = 0
    for index, managed_params in core.shards.by_chunk.items():
        first = managed_params[0]
        kinds = {kind: core.shards.chunk_of(first, list_kind(first, kind)) for kind in saved_kinds(first)}
        nbytes = sum(chunk.nbytes for chunk in kinds.values())
        if first.schema.trained and core.optimizer_step.tiers.home.get(index) is Tier.DISK:
            on_disk += nbytes
            restored = [(kind, chunk.numel) for kind, chunk in kinds.items() if first.restores(kind)]
            in_memory += sum(numel * core.shards.dtype_of(first, kind).itemsize for kind, numel in restored)
        elif first.schema.trained or not kinds[first.full_kind].disk.valid:
            in_memory += nbytes
    return max(1, math.ceil(in_memory / (WRITTEN_SHARE * (on_disk or in_memory or 1))))
