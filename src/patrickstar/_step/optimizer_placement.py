"""Placement of optimizer chunks: first as planned, then by the traces (PatrickStar §8.2, device-aware)."""

import logging
from collections import Counter
from collections.abc import Mapping

from patrickstar._chunks.tracer import Tracer
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._params.local_shards import LocalShards
from patrickstar._schedule.placement import WARM_UP_PERCENT, ChunkTiers, Tier, home_tiers, margin_chunks
from patrickstar._step.budgets import optimizer_room_bytes
from patrickstar._step.optimizer_step import OptimizerStep

_log = logging.getLogger(__name__)


class OptimizerPlacement:
    """Chooses the home tiers of optimizer chunks, and whether fetched parameters keep duplicate copies on the host."""

    def __init__(self, layout: Layout, data: LocalShards, optimizer_step: OptimizerStep, tracer: Tracer) -> None:
        self._data = data
        self._optimizer_step = optimizer_step
        self._tracer = tracer
        self._gradient_room_bytes = layout.gradient_room_bytes
        self._set_keep_duplicates(layout, data.manager.device_tier.budget_bytes * (100 - WARM_UP_PERCENT) // 100)

    def begin(self, placement: Mapping[int, ChunkTiers]) -> None:
        """Set the home tiers before the first measured step; beside an accelerator, make room for the first batch."""
        if self._data.manager.disk_tier is None:
            self._optimizer_step.tiers.home = dict.fromkeys(self._bound_to_device(), Tier.DEVICE)
        else:
            self._optimizer_step.tiers.home = {index: tiers.optimizer for index, tiers in placement.items()}

        device = self._data.manager.device_tier
        if self._data.manager.hardware.has_gpu:  # which comes before an operator makes room for it
            self._data.manager.cache.evict_idle(device.budget_bytes - device.soft_limit_bytes, protect=())
            self._data.update_param_views()

    def begin_step(self, layout: Layout, measured: bool) -> None:
        """Set the home tiers again after a measured iteration, and before a step that is the first to sum gradients."""
        begins_to_sum = self._data.backwards_in_step > 1 and not self._data.accumulates
        self._data.accumulates |= begins_to_sum
        if measured or begins_to_sum:
            self.replan(layout)

    def replan(self, layout: Layout) -> None:
        """Set the home tiers again after a measured step."""
        chunks, manager, non_model_bytes = layout.chunks, self._data.manager, self._tracer.peak_non_model_bytes
        self._set_keep_duplicates(layout, non_model_bytes)
        bound_to_device = self._bound_to_device() if manager.disk_tier is None else set()
        workspace_bytes = self._optimizer_step.rules.default_workspace_bytes(self._data.managed_params)
        chunkable = manager.device_tier.budget_bytes - non_model_bytes - workspace_bytes - self._gradient_room_bytes
        accumulates = self._data.accumulates
        on_host = {managed.location.chunk for managed in self._data.managed_params if managed.on_host} - bound_to_device
        on_device = margin_chunks(
            *(chunks, chunkable),
            gathered_bytes=self._operand_bytes(layout) if manager.hardware.has_gpu else None,
            bound_to_device=bound_to_device,
            on_host=on_host,
            accumulates=accumulates,
        )
        lock_free = self._optimizer_step.lock_free is not None and manager.disk_tier is not None
        if lock_free and not manager.hardware.has_gpu:
            # No step waits for states on disk. Without states in the margin operators keep their freed memory, where
            # they would return it to the system after each use: 0.5 million page faults less in a step of 4 s. Steps
            # before the first lock-free one wait for more; if states moved then, so would the chunks of a log.
            on_device = []
        if manager.disk_tier is None:
            self._optimizer_step.tiers.home = dict.fromkeys(on_device, Tier.DEVICE)
        else:
            host = manager.host_tier
            host_bytes = host.budget_bytes - host.other_peak - host.set_aside_bytes
            device_param_bytes = 0 if manager.cache.evict_everything else chunkable
            room = optimizer_room_bytes(layout, host_bytes, device_param_bytes, on_host)
            self._optimizer_step.tiers.home = home_tiers(chunks, on_device, room, accumulates=accumulates)
        tiers = Counter(self._optimizer_step.tiers.home.values())
        host_count = layout.chunk_count - tiers[Tier.DEVICE] - tiers[Tier.DISK]
        _log.info(
            "plan: optimizer chunks: %d on the device, %d on the host, %d on disk; %d bytes of non-model data",
            *(tiers[Tier.DEVICE], host_count, tiers[Tier.DISK], non_model_bytes),
        )

    def _bound_to_device(self) -> set[int]:
        return self._optimizer_step.tiers.bound_to_device(self._gradient_room_bytes)

    def _operand_bytes(self, layout: Layout) -> int:
        """Return the largest number of bytes of `param16` that one operator of the traced iterations reads.

        A byte of states on the device saves two or more of an update by the host; one that stays gathered saves a byte
        between devices. At the peak there has to be room for what one operator reads, and elsewhere is more.
        """
        accesses = {moment.chunks for trace in self._tracer.traces.values() for moment in trace.moments}
        nbytes = {chunk.index: chunk.compute_bytes for chunk in layout.chunks}
        return max((sum(nbytes[index] for index in read if index in nbytes) for read in accesses), default=0)

    def _set_keep_duplicates(self, layout: Layout, non_model_bytes: int) -> None:
        """Keep duplicate copies on the host, unless all of `param16` fits on the device beside the non-model data.

        Chunks with a duplicate are evicted without a copy. If everything fits, nothing is evicted and the host needs
        no room for duplicates. With a disk they are always kept.
        """
        manager = self._data.manager
        fits = layout.param16_bytes + non_model_bytes <= manager.device_tier.budget_bytes
        manager.transfers.keep_duplicates = manager.disk_tier is not None or not fits or manager.cache.evict_everything
