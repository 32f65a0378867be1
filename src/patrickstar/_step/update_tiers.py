"""Tiers on which chunks are updated, and the moves there."""

from collections.abc import Sequence

from patrickstar._layout.schema import SHARD16
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk


class UpdateTiers:
    """Home tiers of optimizer chunks, where they are updated.

    Args:
        waits_for_copies: Updates on the host wait for the copies of their chunks themselves.
    """

    def __init__(self, data: LocalShards, waits_for_copies: bool) -> None:
        self.data = data
        self.home: dict[int, Tier] = {}
        """Home tier of the optimizer chunks of each index; the host for others."""
        self._waits_for_copies = waits_for_copies

    def bound_to_device(self, beside_bytes: int) -> set[int]:
        """Return indices whose optimizer chunks are on the device and do not fit on the host.

        Evicting them must leave the host `beside_bytes` and enough room to swap two `param16` chunks.
        """
        manager = self.data.manager
        param_chunks = [managed_params[0].chunk for managed_params in self.data.by_chunk.values()]
        exchange = 2 * max(0 if chunk.sharded else chunk.nbytes for chunk in param_chunks)
        free = manager.host_tier.free_bytes + manager.host_tier.spare_bytes - exchange - beside_bytes
        bound = set()
        for index in self.data.by_chunk:
            # Some of them may have been evicted already, to make room for `param16`.
            chunks = self.data.optimizer_chunks(index)
            on_device = [chunk for chunk in chunks if chunk.device.valid and not chunk.host.valid]
            if on_device:
                nbytes = sum(chunk.nbytes for chunk in on_device)
                if nbytes > free:
                    bound.add(index)
                else:
                    free -= nbytes
        return bound

    def tier_of(self, index: int) -> Tier:
        """Return the tier to update on: the home tier, or the disk while a host home tier has no room yet."""
        home, manager = self.home.get(index, Tier.HOST), self.data.manager
        if home is Tier.HOST and manager.disk_tier is not None:
            needed = sum(chunk.nbytes for chunk in self._optimizer_chunks(index) if not chunk.host.present)
            if not manager.host_tier.has_room(needed):
                return Tier.DISK
        return home

    def _optimizer_chunks(self, index: int) -> list[Chunk]:
        return [*self.data.optimizer_chunks(index), *self.data.gradient_sums(index)]

    def _fits_host(self, chunk: Chunk) -> bool:
        """Return whether a chunk that is on the device fits on the host."""
        return chunk.device.valid and (chunk.host_bytes > 0 or self.data.manager.host_tier.has_room(chunk.nbytes))

    def move(self, index: int, managed_params: Sequence[ManagedParam], tier: Tier | None = None) -> None:
        """Move the optimizer chunks of one index to the tier that they are updated on, `tier_of` by default.

        For an update on the host the `param16` chunk stays on the device if it is there: gradients are copied D2H and
        parameters H2D, beside operators. Chunks that are on the device after backward are those that the next forward
        uses first, so nothing would be gained by moving them.
        """
        manager = self.data.manager
        home = self.tier_of(index) if tier is None else tier
        chunks, param16 = self._optimizer_chunks(index), managed_params[0].shard_chunk
        if home is Tier.DISK and managed_params[0].schema.gradients_beside:  # these are read in memory, and freed
            chunks = self.data.optimizer_chunks(index)
        # Also if only other ranks own elements with a gradient: linked processes move the same chunks.
        if any(managed.has_gradient or managed.in_next_step for managed in managed_params):
            manager.transfers.settle(param16, in_order=True)
            # Operators read gathered chunks: a shard follows its states, except to the disk.
            if home is Tier.DEVICE:
                chunks.append(param16)
            elif param16.kind == SHARD16 and self._fits_host(param16):
                manager.move_to_tier(param16, Tier.HOST)
            elif home is Tier.HOST:
                manager.ensure_in_memory(param16, in_order=self._waits_for_copies)
        if home is Tier.DEVICE:
            for sums in self.data.gradient_sums(index):
                if sums.host.writer is not None:  # gradients on their way to the host, on a stream of their own
                    manager.io_dispatch.order(sums.host.writer)
            manager.cache.fetch(chunks)
        for chunk in chunks:
            manager.move_to_tier(chunk, home)
        self.data.update_param_views()
