"""Where optimizer chunks live: at first as was planned, then as the traces say (PatrickStar §8.2, device-aware)."""

from collections.abc import Mapping

from patrickstar._layout.chunk_mapping import Layout
from patrickstar._memory.tracer import Tracer
from patrickstar._params.model_data import ModelData
from patrickstar._schedule.placement import WARM_UP_PERCENT, ChunkTiers, Tier, home_tiers, margin_chunks
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.tier_planning import optimizer_room_bytes


class OptimizerPlacement:
    """Says it to the update, and to the manager whether parameters that come up keep their copies on the host."""

    def __init__(self, layout: Layout, data: ModelData, update: OptimizerStep, clock: Tracer) -> None:
        self._data = data
        self._update = update
        self._clock = clock
        self._set_keep_duplicates(layout, data.manager.device_tier.budget_bytes * (100 - WARM_UP_PERCENT) // 100)

    def begin(self, placement: Mapping[int, ChunkTiers]) -> None:
        """Before anything is measured."""
        if self._data.manager.disk_tier is None:
            self._update.home_tiers = dict.fromkeys(self._update.bound_to_device(), Tier.DEVICE)
        else:
            self._update.home_tiers = {index: place.optimizer for index, place in placement.items()}

    def replan(self, layout: Layout) -> None:
        """When a step has been measured."""
        chunks, manager, beside_bytes = layout.chunks, self._data.manager, self._clock.peak_non_model_bytes
        self._set_keep_duplicates(layout, beside_bytes)
        bound_to_device = self._update.bound_to_device() if manager.disk_tier is None else set()
        chunkable = manager.device_tier.budget_bytes - beside_bytes - self._update.workspace_bytes()
        accumulates = self._data.accumulates
        on_host = {managed.location.chunk for managed in self._data.managed_params if managed.on_host} - bound_to_device
        above = (
            set(margin_chunks(chunks, chunkable, bound_to_device=bound_to_device, accumulates=accumulates)) - on_host
        )
        if manager.disk_tier is None:
            self._update.home_tiers = dict.fromkeys(above, Tier.DEVICE)
            return
        beside_chunks = manager.host_tier.budget_bytes - manager.host_tier.other_peak
        kept = 0 if manager.evict_everything else chunkable
        room = optimizer_room_bytes(layout, beside_chunks, kept, on_host)
        self._update.home_tiers = home_tiers(chunks, above, room, accumulates=accumulates)

    def _set_keep_duplicates(self, layout: Layout, beside_bytes: int) -> None:
        """They do, and can be dropped without a write, unless all of `param16` fits beside this many bytes.

        Then none has to leave, and the host needs no room for it. With a disk they always do.
        """
        manager = self._data.manager
        fits = layout.param16_bytes + beside_bytes <= manager.device_tier.budget_bytes
        manager.transfers.keep_duplicates = manager.disk_tier is not None or not fits or manager.evict_everything
