"""Where optimizer chunks live: at first as was planned, then as the traces say (PatrickStar §8.2, device-aware)."""

from collections.abc import Mapping

from patrickstar._layout.chunk_mapping import Layout
from patrickstar._memory.tracer import Clock
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.placement import WARM_UP_PERCENT, Tier, Tiers, homes, margin_chunks
from patrickstar._step.optimizer_step import Update
from patrickstar._step.tier_planning import optimizer_room_bytes


class Homes:
    """Says it to the update, and to the manager whether parameters that come up keep their copies on the host."""

    def __init__(self, layout: Layout, data: ModelData, update: Update, clock: Clock) -> None:
        self._data = data
        self._update = update
        self._clock = clock
        self._keep_duplicates(layout, data.manager.compute.budget_bytes * (100 - WARM_UP_PERCENT) // 100)

    def begin(self, placement: Mapping[int, Tiers]) -> None:
        """Before anything is measured."""
        if self._data.manager.disk is None:
            self._update.homes = dict.fromkeys(self._update.stuck(), Tier.DEVICE)
        else:
            self._update.homes = {index: place.optimizer for index, place in placement.items()}

    def follow_traces(self, layout: Layout) -> None:
        """When a step has been measured."""
        chunks, manager, beside_bytes = layout.chunks, self._data.manager, self._clock.peak_non_model_bytes
        self._keep_duplicates(layout, beside_bytes)
        stuck = self._update.stuck() if manager.disk is None else set()
        chunkable = manager.compute.budget_bytes - beside_bytes - self._update.workspace_bytes()
        accumulates = self._data.accumulates
        on_host = {slot.place.chunk for slot in self._data.slots if slot.on_host} - stuck
        above = set(margin_chunks(chunks, chunkable, stuck=stuck, accumulates=accumulates)) - on_host
        if manager.disk is None:
            self._update.homes = dict.fromkeys(above, Tier.DEVICE)
            return
        beside_chunks = manager.host.budget_bytes - manager.host.other_peak
        kept = 0 if manager.evict_everything else chunkable
        room = optimizer_room_bytes(layout, beside_chunks, kept, on_host)
        self._update.homes = homes(chunks, above, room, accumulates=accumulates)

    def _keep_duplicates(self, layout: Layout, beside_bytes: int) -> None:
        """They do, and can be dropped without a write, unless all of `param16` fits beside this many bytes.

        Then none has to leave, and the host needs no room for it. With a disk they always do.
        """
        manager = self._data.manager
        fits = layout.param16_bytes + beside_bytes <= manager.compute.budget_bytes
        manager.moves.keep_duplicates = manager.disk is not None or not fits or manager.evict_everything
