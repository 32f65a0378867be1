"""Updates during backward whose results count if the step decides what they assumed (speculation)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.several_processes import Sharing
from patrickstar._step.disk_speculation import DiskSpeculation, SparePages
from patrickstar._step.host_speculation import HostSpeculation, SpareBlocks
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.update import InPlace, SpareHome, Update
from patrickstar._step.update_rules import GroupOf

# [Note: speculation]
# Clipping, loss scaling and the caller's choices are known at `optimizer.step()` only. During backward a chunk whose
# gradients are complete is updated at once all the same, on the assumption that the step will scale gradients as at
# the start of the backward and use the same rules. New masters, states and parameters go elsewhere: to spare blocks of
# the host (see [Note: spare blocks]), or from disk to spare pages of the swap file. The old ones and the gradients stay
# where they are. The step compares its scales and rules with those assumed, and the versions of all chunks that were
# read with those at the start. If they are equal, the new ones take the place of the old ones, else they are dropped
# and the step updates the chunk. So the bits are those of an update in the step either way.
#
# The chunk that was completed last is updated first: the next forward uses it first. The chunks that would be dropped
# for lack of spare blocks are passed over in the next step.
#
# With several processes each updates its own shards, once their reductions have ended, while later chunks are still
# reduced. What it has updated by then is its own affair; the decision is the same on all, as the scales are.
#
# A miss costs the time of its updates, which run beside the device's work. After a step that decided otherwise nothing
# is assumed until one has decided as assumed again.


@dataclass
class Assumption:
    """Assumptions of a backward about its step."""

    group_of: GroupOf
    scales: Sequence[float]
    passed_over: list[int] = field(default_factory=list)
    """Indices of the chunks that were completed first and are not updated."""
    candidates: list[int] = field(default_factory=list)
    """Indices of complete chunks without an update, the last completed one last."""


class Speculation:
    """Starts updates during backward and decides at the step which of them count. See [Note: speculation]."""

    def __init__(self, sharing: Sharing, optimizer_step: OptimizerStep, enabled: bool = True) -> None:
        self.data, self._sharing = sharing.shards, sharing
        self._optimizer_step = optimizer_step
        self._host: HostSpeculation | None = None
        self._disk: DiskSpeculation | None = None
        self._speculators: list[HostSpeculation | DiskSpeculation] = []
        if enabled and optimizer_step.together is None:
            if optimizer_step.updates.host is not None:
                self._host = HostSpeculation(self.data, optimizer_step.updates, optimizer_step.updates.host)
                self._speculators.append(self._host)
            if optimizer_step.updates.disk is not None:
                self._disk = DiskSpeculation(self.data, optimizer_step.updates.disk)
                self._speculators.append(self._disk)
        self._in_place = InPlace(self.data)
        self.assumption: Assumption | None = None
        """What a backward that updates chunks assumes."""
        self._confident = False
        """True if the last step decided as its backward assumed or would have."""
        self._scales: Sequence[float] = ()
        self._options: Any = None
        self._backwards = 0
        """Number of backwards before the last step."""
        self._passed_over = 0
        """Number of chunks completed first that are not updated, because later ones would take their spare blocks."""

    @property
    def possible(self) -> bool:
        """True if updates can run beside operators."""
        return bool(self._speculators)

    @property
    def _undecided(self) -> dict[Update, SpareBlocks | SparePages]:
        """Updates that the step decides on, with their homes."""
        pairs = ((update, update.home) for update in self._optimizer_step.updates.queue.updates)
        return {
            update: home for update, home in pairs if isinstance(home, SpareBlocks | SparePages) and home.speculative
        }

    def begin(
        self,
        groups: Callable[[], Mapping[ManagedParam, Mapping[str, Any]]],
        options: Any,
        scales: Sequence[float],
        *,
        promised: bool = False,
    ) -> None:
        """Begin a backward.

        Args:
            groups: Returns the param group of each parameter.
            options: Copy of the hyper-parameters, to be compared with those of the step.
            scales: Factors of the gradients if nothing is clipped.
            promised: The caller says that the step comes next, and clips nothing.
        """
        self.cancel()
        self._scales, self._options = scales, options
        if promised or (self._confident and self.data.backwards_in_step == self._backwards):
            self.assumption = Assumption(groups().get, scales)
            if self._host is not None:
                self._host.begin()

    def add(self, index: int) -> None:
        """Add a chunk whose gradients are complete."""
        if self.assumption is not None:
            passed_over = self.assumption.passed_over
            needs_spare_block = self._host is not None and self.data.state_chunks(index)[0].in_memory
            skips = needs_spare_block and len(passed_over) < self._passed_over
            (passed_over if skips else self.assumption.candidates).append(index)

    def progress(self) -> None:
        """Start updates of complete chunks."""
        if self.assumption is None:
            return
        if self._host is not None and self._host.withdrawn:
            self.assumption.candidates[:0] = self._host.withdrawn
            self._host.withdrawn.clear()
        if self.assumption.candidates:
            self._start(self.assumption)

    def _start(self, assumption: Assumption) -> None:
        capacity = {speculator: speculator.capacity for speculator in self._speculators}
        for index in assumption.candidates[::-1]:
            if max(capacity.values()) <= 0:
                return
            if not self._sharing.gradients_are_reduced(index):
                continue
            inputs = self._in_place.used(index)
            speculator = next((each for each in self._speculators if each.accepts(inputs)), None)
            if speculator is None:
                assumption.candidates.remove(index)
                continue
            if capacity[speculator] <= 0 or self.data.manager.transfers.would_wait(inputs[0]):
                continue
            assumption.candidates.remove(index)
            managed_params = [managed for managed in self.data.by_chunk[index] if managed.location.numel]
            rules = self._optimizer_step.rules.next(managed_params, assumption.group_of)
            # A spare block or page holds a part of the chunk: every parameter in it has to be updated.
            if not rules or len(rules) < len(managed_params) or not all(rule.by_pages for rule in rules.values()):
                continue
            self.data.manager.transfers.complete(inputs[0])
            self.data.update_param_views()
            if inputs[0].in_memory and speculator.start(index, rules, assumption.scales):
                capacity[speculator] -= 1

    # The step

    def decide(self, group_of: GroupOf, options: Any, scales: Sequence[float], overflow: bool) -> None:
        """Commit the updates that a step's decisions confirm, and drop the others.

        Args:
            group_of: Returns the param group of a parameter.
            options: Hyper-parameters of the step.
            scales: Factors of the gradients, with those of clipping.
            overflow: The step is skipped.
        """
        assumption, self.assumption = self.assumption, None
        counters, decided = self.data.manager.counters, not overflow and _effective(scales) == _effective(self._scales)
        undecided = self._undecided
        last = {update.index: update for update in undecided}  # one that was put off may have been started again
        for index in sorted(last, key=self.data.tracer.trace.first_use):
            update, home = last[index], undecided[last[index]]
            valid = decided and self._is_valid(update, home, group_of)
            confirmed = valid and home.keep(update)
            counters.speculated += confirmed or not valid
            if confirmed:
                counters.speculation_hits += 1
                self._optimizer_step.before_update(index)
                for managed in update.rules:
                    managed.begin_update()
                home.commit(update)
            else:
                home.drop(update)
        self._drop()
        self._confident = decided and options == self._options
        self._backwards = self.data.backwards_in_step
        if self._disk is not None:
            self._disk.end_step(self._confident)
        if self._host is not None:
            replaced = self._host.end_step()
            if assumption is not None:
                passed_over = assumption.passed_over
                self._passed_over = len(passed_over) + replaced - self._host.room(passed_over)

    def _is_valid(self, update: Update, home: SpareHome, group_of: GroupOf) -> bool:
        """Return whether an update has read what the step would read, and used the rules that the step would use."""
        managed_params = self.data.by_chunk[update.index]
        return home.reads_present(update.index) and (
            self._optimizer_step.rules.next(managed_params, group_of) == update.rules
        )

    def cancel(self) -> None:
        """Drop all updates."""
        self.assumption = None
        self._drop()

    def _drop(self) -> None:
        for update, home in self._undecided.items():
            home.drop(update)
            self._optimizer_step.updates.queue.remove(update)


def _effective(scales: Iterable[float]) -> list[float]:
    """Return the factors that change a gradient: multiplying by one is exact."""
    return [scale for scale in scales if scale != 1.0]
