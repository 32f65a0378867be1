"""Delayed updates: each runs beside the forward and backward of the next step (ZeRO-Offload §5.2)."""

from collections.abc import Collection, Mapping, Sequence

import torch

from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._kernels.update_rule import Rule
from patrickstar._layout.schema import DELAYED16
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._step.update import DelayedList, Update
from patrickstar._step.update_dispatch import Updates
from patrickstar._tiers.chunk import Chunk

# [Note: delayed updates]
# Let M(i) be the masters after the update with the gradients g(i) of step i, and R(M) the parameters: masters rounded
# to the compute dtype. Step i computes g(i) with R(M(i-1)) up to step `after`, and with R(M(i-2)) from the next one on.
# Learning rate, loss scale and clipping of an update are those of the step that computed its gradients.
#
# `optimizer.step()` number i waits for the update with g(i-1), which has run since the last step. Then each chunk
# exchanges two lists: the gradients g(i), which are in place of the parameters, move to the list `delayed16`, and the
# parameters R(M(i-1)), which the update has written there, take their place. The update with g(i) begins; it reads its
# gradients from `delayed16` and writes R(M(i)) over them. So a delay takes one more list of the compute dtype.
#
# Until the next step a parameter is not its rounded master, and its gradient overwrites the only copy: it cannot be
# restored, as is done elsewhere, if it is read again before the step. Gradients that are accumulated over several
# backwards are therefore added to the gradient list at once, as soon as the engine knows that a step has several.
# The update of a step with accumulated gradients reads them from that list; the next step may write there only once
# it has ended.

SLICE_NUMEL = 1 << 20
"""Elements that are exchanged at a time, with a temporary copy."""


class DelayedUpdates:
    """Updates whose results operators read one step later. See [Note: delayed updates].

    Args:
        after: Number of the first step whose update is delayed, counted from 1.
    """

    def __init__(self, data: LocalShards, updates: Updates, after: int) -> None:
        self.data = data
        self.after = after
        self._exchanged: set[int] = set()
        """Indices of the chunks that were exchanged in a step that has not ended: Ctrl-C or an error interrupted it."""
        self._updates = updates

    @property
    def staleness(self) -> tuple[float, int]:
        """Number of updates that the parameters do not contain yet: mean over their elements, and maximum."""
        trained = [managed for managed in self.data.managed_params if managed.schema.trained]
        late = sum(managed.numel for managed in trained if managed.state.late)
        return late / max(1, sum(managed.numel for managed in trained)), min(late, 1)

    def list_of(self, index: int) -> Chunk:
        """Return the chunk of delayed gradients of an index."""
        return self.data.manager[DELAYED16, index]

    def begin_chunk(self, index: int) -> bool:
        """Return whether the step has to do anything for a chunk: not if it did before the step was interrupted."""
        repeated = index in self._exchanged
        self._exchanged.add(index)
        return not repeated or any(managed.has_gradient for managed in self.data.by_chunk[index])

    def end_step(self) -> None:
        """End the step: all chunks have been exchanged."""
        self._exchanged.clear()

    def update(self, index: int, rules: Mapping[ManagedParam, Rule], scales: Sequence[float]) -> None:
        """Start the update of one chunk, whose last one has ended, on the tier of its states."""
        home = DelayedList(self.data, {managed for managed in rules if managed.state.accumulated})
        update = Update(index, rules, scales, home)
        for managed in rules:
            managed.count_update()
        try:
            self._exchange_chunk(index, rules, home.listed)
        except BaseException as error:
            update.give_up(error)
            raise
        if rules:
            self._updates.start(update)

    def publish_all(self) -> None:
        """Make the newest parameters those that operators read. All updates have ended."""
        for managed in self.data.managed_params:
            interruption_point()
            self._publish(managed)
        self.data.update_param_views()

    def _exchange_chunk(self, index: int, rules: Mapping[ManagedParam, Rule], listed: Collection[ManagedParam]) -> None:
        """Move the gradients of one chunk's parameters out, and make the newest parameters those that operators read.

        Args:
            rules: Rules of the parameters whose gradients are to be used.
            listed: Those of them whose gradients are to be in the gradient list, not in `delayed16`.
        """
        if self._exchange_whole(index, rules):
            self._delay(rules)
            return
        for managed in self.data.by_chunk[index]:
            if managed in listed:
                if managed.overlays_shard:
                    self.data.list_gradient(managed)
                self._renew(managed)
            elif managed in rules:
                self._exchange(managed)
            else:
                self._publish(managed)
                continue
            self._delay([managed])

    def _delay(self, managed_params: Collection[ManagedParam]) -> None:
        self.data.end_update(managed_params)
        for managed in managed_params:
            managed.state.late = True

    def _publish(self, managed: ManagedParam) -> None:
        """Make the newest values of a parameter those that operators read, unless its gradient is in their place."""
        if not managed.state.late:
            return
        if not managed.overlays_shard:  # else the gradient is discarded by rounding the master
            self._renew(managed)
            torch.autograd.graph.increment_version(managed.param)
        managed.state.end_late(managed.param._version)

    def hold_back(self, managed: ManagedParam) -> None:
        """Let operators read on what is in the parameter's place, and not its master, until the next step."""
        if managed.location.numel:
            self._exchange(managed, delayed=False)  # the parameter becomes its rounded master
            self._exchange(managed, delayed=True)
        torch.autograd.graph.increment_version(managed.param)
        managed.state.late = True

    def _exchange_whole(self, index: int, rules: Mapping[ManagedParam, Rule]) -> bool:
        """Exchange a chunk with its list on the host, by exchanging their memory. Return False if that can't be done.

        Every parameter in the chunk must have a gradient in its place, and newer values in the list.
        """
        delayed = self.list_of(index)
        managed_params = [managed for managed in self.data.by_chunk[index] if managed.location.numel]
        if delayed.device.valid or not delayed.host.valid or not managed_params:
            return False
        if not all(
            managed in rules and managed.state.late and managed.overlays_shard and not managed.state.accumulated
            for managed in managed_params
        ):
            return False
        exchanged = self.data.manager.exchange(managed_params[0].shard_chunk, delayed)
        self.data.update_param_views()
        return exchanged

    def _renew(self, managed: ManagedParam) -> None:
        """Replace a parameter, or the gradient in its place, by the newest values."""
        if not managed.state.late:
            if managed.overlays_shard:
                self.data.restore_own(managed)
            return
        self.data.ensure_local(managed)
        for where, values in self.data.parts(managed, DELAYED16):
            self._payload(managed)[where].copy_(values)
        self._count(managed, to_list=False)
        self._mark_written(managed)

    def _exchange(self, managed: ManagedParam, *, delayed: bool | None = None) -> None:
        """Exchange what is in the place of a parameter with its elements of `delayed16`.

        `delayed`: these are newer values of the parameter; if not, it is restored. Default: as its state says.
        """
        delayed = managed.state.late if delayed is None else delayed
        self.data.ensure_local(managed)
        for where, values in self.data.parts(managed, DELAYED16, write=True):
            payload = self._payload(managed)[where]
            for first in range(0, payload.numel(), SLICE_NUMEL):
                part = slice(first, first + SLICE_NUMEL)
                moved = payload[part].to(values.device, copy=True)
                if delayed:
                    payload[part].copy_(values[part])
                values[part].copy_(moved)
        self._count(managed, to_list=True)
        if delayed:
            self._count(managed, to_list=False)
            self._mark_written(managed)
        else:
            self.data.restore_own(managed)

    def _payload(self, managed: ManagedParam) -> torch.Tensor:
        self.data.ensure_local(managed)
        return managed.flat(managed.shard_chunk)

    def _mark_written(self, managed: ManagedParam) -> None:
        self.data.manager.mark_written(managed.shard_chunk, on_device=managed.shard_chunk.device.valid)

    def _count(self, managed: ManagedParam, *, to_list: bool) -> None:
        """Count a copy between the place of a parameter and its elements of `delayed16`, if it changes the tier."""
        chunk, delayed = managed.shard_chunk, self.list_of(managed.location.chunk)
        if chunk.device.valid != delayed.device.valid:
            nbytes = managed.location.numel * chunk.dtype.itemsize
            chunk.transferred_bytes += nbytes
            target = delayed if to_list else chunk
            self.data.manager.count_transfer(nbytes, to_device=target.device.valid)
