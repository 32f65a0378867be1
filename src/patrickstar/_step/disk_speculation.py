"""Speculative updates of chunks whose states are on disk: into spare pages, while the disk would be idle."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from patrickstar._kernels.update_rule import Rule, Span
from patrickstar._layout.schema import GRAD32, PARAM16
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.staging_pool import PageSet, StagingPool
from patrickstar._step.update import WHOLE, Part, Rules, SpareHome, Update
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError, DiskError

IN_FLIGHT = 2
"""Updates whose pages are read or updated at a time."""

_log = logging.getLogger(__name__)


class SparePages(SpareHome):
    """Spare pages of the disk, which are exchanged for the chunk's pages when the step commits them."""

    def __init__(self, data: LocalShards, index: int, disk_step: DiskOptimizerStep) -> None:
        super().__init__(data, index)
        self._disk_step = disk_step
        self._gradients = {chunk: chunk.version for chunk in self.inputs if chunk.in_memory}

    @property
    def is_current(self) -> bool:
        """True if the gradients are in memory and have not changed."""
        return all(chunk.in_memory and chunk.version == version for chunk, version in self._gradients.items())

    def span(self, managed: ManagedParam, rule: Rule, part: Part = WHOLE) -> Span:
        """Return the tensors of an update whose new parameters go to a page of their own."""
        read = {kind: view for kind, view in part.views.items() if kind != PARAM16}
        return replace(super().span(managed, rule, part._replace(views=read)), param=part.views[PARAM16])

    def end_page(self, pages: PageSet, pool: StagingPool) -> None:
        """Start to write a page set to spare pages."""
        pool.write_spare(pages, pages.owner.param16)

    def end(self, rules: Rules) -> None:
        """Do nothing: the step decides."""

    def keep(self, update: Update) -> bool:
        """Return whether all pages are updated."""
        return update.complete and not update.given_up

    def commit(self, update: Update) -> None:
        """Exchange the pages of the chunk for its spare pages."""
        manager = self.data.manager
        assert manager.disk_tier is not None, "states are on disk without a disk"
        self.speculative = False
        self._disk_step.remove(update)
        self._disk_step.read_ahead.expect(update)
        for chunk in update.lists:
            manager.disk_tier.swap_spare(chunk)
            chunk.version += 1
        manager.disk_tier.swap_spare(update.param16)
        manager.cache.withdraw_hold(update.param16)  # its device memory is freed
        manager.transfers.disk_renewed(update.param16)
        self.data.end_update(update.rules)
        self.data.update_param_views()

    def drop(self, update: Update) -> None:
        """Give an update up; its pages that are read and not updated serve later ones."""
        update.given_up = True
        self._disk_step.release(update)


class DiskSpeculation:
    """Starts updates whose results are in spare pages until the step decides. See [Note: speculation].

    New parameters are written to spare pages too: the host may have no memory for them, and the gradients keep their
    place. So such an update writes 2 bytes per parameter more than one in the step, and the next forward reads them.
    """

    def __init__(self, data: LocalShards, disk_step: DiskOptimizerStep) -> None:
        self.data = data
        self._disk_step = disk_step
        self._full = False
        """True once the disk had no room for spare pages."""
        self._limit = 0
        """Number of updates to start in a backward: as many as were late in the last forwards."""
        self._count = 0

    def end_step(self, confident: bool) -> None:
        """Choose how many updates the next backward starts; `confident`: it is likely to start some."""
        late = len(self._disk_step.late)
        self._limit = self._limit + late if late else max(0, self._limit - 1)
        self._count = 0
        self._disk_step.late.clear()
        # Pages that are read now would give up their buffers to speculative updates.
        self._disk_step.read_ahead.reads_expected = not (confident and self._limit)

    @property
    def capacity(self) -> int:
        """Number of updates that may be started now: one whose pages are read while another's are updated."""
        queued = (update for update in self._disk_step.updates if update.home.speculative)
        return IN_FLIGHT - sum(not update.complete for update in queued)

    def accepts(self, inputs: Sequence[Chunk]) -> bool:
        """Return whether masters and states are on disk, and sums of gradients, if there are any, in memory."""
        disk, param16 = self.data.manager.disk_tier, inputs[0]
        if self._full or disk is None or self._count >= self._limit or not self._disk_step.read_ahead.enabled:
            return False
        page_numel = disk.page_bytes_of(param16) // param16.dtype.itemsize
        return all(
            chunk.in_memory
            if chunk.kind == GRAD32
            else not chunk.in_memory and disk.page_bytes_of(chunk) // chunk.dtype.itemsize == page_numel
            for chunk in inputs[1:]
        )

    def start(self, index: int, rules: Mapping[ManagedParam, Rule], scales: Sequence[float]) -> bool:
        """Start to update a chunk. Return False if the disk has no room for its spare pages."""
        disk, home = self.data.manager.disk_tier, SparePages(self.data, index, self._disk_step)
        assert disk is not None, "states are on disk without a disk"
        try:
            for chunk in home.inputs:
                if chunk.kind != GRAD32:
                    disk.reserve(chunk)
                    disk.reserve_spare(chunk)
        except (DiskError, BudgetError) as error:
            self._full = True
            _log.warning("updates of chunks on disk wait for the optimizer step: %s", error)
            return False
        self._disk_step.submit(Update(index, rules, scales, home))
        self._count += 1
        return True
