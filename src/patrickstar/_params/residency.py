"""Iterations and evaluations during which all parameters stay on the device."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from patrickstar._chunks.iteration_mode import Mode
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam

# [Note: resident iterations]
# If all of an iteration's parameters fit on the device beside the peak of non-model data that its trace shows, no
# chunk has to move and no memory has to be measured. Its chunks are then held: pinned from their first access to the
# optimizer step. Operators on held chunks and their backward windows run without moments, transfers or measurements.
# It takes three iterations to know: the first is traced, the second confirms the memory figures, the third measures
# them with freed memory cached, if the meter counts that. A resident iteration is measured as a whole; if it exceeds
# the budget, the next is traced again. If memory for chunks is needed during the iteration (another gradient list, an
# evaluation), held chunks are evicted last; windows fetch them again.

MAX_FORWARDS = 256
"""Forwards without a backward whose accesses are kept: nobody may ever compute gradients of theirs."""


class Residency:
    """Holds chunks on the device for the length of an iteration or evaluation. See [Note: resident iterations]."""

    def __init__(self, shards: LocalShards) -> None:
        self.manager, self.tracer, self._by_chunk = shards.manager, shards.tracer, shards.by_chunk
        self._shards = shards
        self.active = False
        """True while accessed chunks are held, and operators on held chunks run without an access."""
        self._evaluating = False
        self._forwards = 0
        """Number of forwards before the first backward of an iteration that is traced."""

    def begin_iteration(self, key: Hashable, *, before_backward: bool) -> None:
        """Open an iteration of this kind before a forward, unless one is open.

        One that is traced for `MAX_FORWARDS` without a backward is forgotten, and another opened.
        """
        self._forwards += before_backward and self.tracer.unconfirmed
        if self._forwards >= MAX_FORWARDS:
            self.tracer.discard_iteration()
        if self.tracer.open_key is None:
            self._forwards = 0
            self.tracer.begin_iteration(key)
            if self.tracer.mode is Mode.RESIDENT:
                self._begin()
                self.manager.device_tier.note_non_model_bytes()  # for all of it: its operators have no moments

    def covers(self, managed_params: Iterable[ManagedParam]) -> bool:
        """Return whether parameters are on held chunks, intact and up to date: while `active`, no access is needed."""
        number = self._shards.backward_id if self._shards.in_backward else None
        for managed in managed_params:  # a loop, since this runs for every operator
            state = managed.state
            if not managed.chunk.held or state.overlays_param or state.update_pending:
                return False
            if managed.schema.gradients_beside and state.listed_in == number:  # the access notes that it is read again
                return False
        return True

    def end(self) -> None:
        """End all holds."""
        self.active = False
        self.manager.cache.withdraw_holds()

    @property
    def may_plan(self) -> bool:
        """True if a forward without gradients that begins now can be planned by itself: it is a part of no other."""
        return self.tracer.open_key is None and not self._evaluating

    @contextmanager
    def evaluation(self, key: Hashable) -> Iterator[None]:
        """Plan a forward without gradients: hold chunks if all are known to fit, else follow the trace of its kind."""
        outer, self._evaluating = self._evaluating, True
        try:
            with self._planned(key):
                yield
        finally:
            self._evaluating = outer

    @contextmanager
    def _planned(self, key: Hashable) -> Iterator[None]:
        key = self.tracer.common(key)
        in_iteration, fits = self.active, self.tracer.evaluation_fits(key)
        if in_iteration:
            reserved_bytes = self.manager.device_tier.non_model_bytes
            self.active = fits
            try:
                yield
            finally:
                self.active = True
                self.manager.device_tier.non_model_bytes = reserved_bytes
            return
        if not fits and self.tracer.begin_planned_evaluation(key):
            with self.tracer.in_iteration():
                yield  # after an exception the engine discards it
            self.tracer.end_iteration()
            return
        measured = self.tracer.begin_evaluation()
        if fits:
            self._begin()
        try:
            yield
        finally:
            if fits:
                self.end()
                self.tracer.measure()
        if measured:
            self.tracer.end_evaluation(key)

    def _begin(self) -> None:
        """Hold the chunks that are on the device; others are held from their first access."""
        self.active = True
        for index, chunk in self.manager.param16.items():
            on_host = any(managed.on_host for managed in self._by_chunk[index])
            if chunk.device.valid and not chunk.pins and chunk.device.reader is None and not on_host:
                self.manager.cache.hold(chunk)
