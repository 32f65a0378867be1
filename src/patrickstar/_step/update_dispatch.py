"""Start of updates where the states of their chunks are, their progress and their end."""

from collections.abc import Sequence
from functools import partial

from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._kernels.dispatch import Kernels
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._schedule.placement import Tier
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.update import Update
from patrickstar._step.update_queue import UpdateQueue

# [Note: parts of an update]
# An `Update` is what is computed: chunk, rules, scales, and the home that says with which memory. When it begins is a
# matter of whoever calls `Updates.start`: the step (`OptimizerStep`), a backward that updates (`OptimizerInBackward`)
# or assumes what the step will decide (`Speculation`), the next step (`DelayedUpdates`), or the disk, at its speed
# (`LockFreeUpdates`). Where it runs is where the states of its chunk are: at once on the device, or on the host of a
# CPU; on the host beside operators of a device (`HostUpdates`); from disk, page by page (`DiskOptimizerStep`).
# `UpdateQueue` holds all that have not ended.


class Updates:
    """Starts updates, and ends them. See [Note: parts of an update].

    Args:
        host: Updates on the host beside operators; None on a CPU, where both would compete for the cores.
        disk: Updates of states on disk; None without a disk.
    """

    def __init__(
        self,
        data: LocalShards,
        kernels: Kernels,
        queue: UpdateQueue,
        host: HostUpdates | None,
        disk: DiskOptimizerStep | None,
    ) -> None:
        self.data = data
        self.queue, self.host, self.disk = queue, host, disk
        self._kernels = kernels

    def start(self, update: Update, *, beside: bool = True, urgent: bool = False) -> None:
        """Start an update. Raises its error if it fails at once.

        Args:
            beside: In memory, run it beside operators if that is possible.
            urgent: Run it before those that have not begun.
        """
        try:
            states = self.data.state_chunks(update.index)
            if all(chunk.in_memory for chunk in states):
                self.run(update, beside=beside, urgent=urgent)
            else:
                for chunk in states:
                    if chunk.in_memory:  # room on the host was made by others of them
                        self.data.manager.move_to_tier(chunk, Tier.DISK)
                assert self.disk is not None, "without a disk all chunks are in memory"
                self.disk.submit(update)
        except BaseException as error:
            update.give_up(error)
            raise

    def run(self, update: Update, *, beside: bool = True, urgent: bool = False) -> None:
        """Run an update in memory, or start to, as `start` does; its failure is the caller's."""
        home, index = update.home, update.index
        on_device = self.data.state_chunks(index)[0].device.valid
        host = self.host if beside and not on_device else None
        with profiler_range("update", *update.rules):
            spans = home.whole(update, beside=host is not None, waits=host is not None and host.waits_for_copies)
            if host is None:
                home.compute(self._kernels, spans, update.scales)
            else:
                update.running = host.start(spans, update.scales, home.used(index), urgent)
                if not home.late and any(rule.needs_shape for rule in update.rules.values()):
                    update.running.wait()  # while the device has room for its products of matrices
        for chunk in home.written(index):
            self.data.manager.mark_written(chunk, on_device=chunk.device.valid)
        home.begin(update.rules)
        if update.running is None:
            home.finish(update)
        else:
            self.add(update)

    def add(self, update: Update) -> None:
        """Add an update that runs beside operators to the queue."""
        assert update.running is not None, "the update has been started"
        if update not in self.queue.updates:
            self.queue.updates.append(update)
        copies = update.home.copies(update.home.used(update.index))
        self.queue.run(update, update.running, copies, partial(self._finish, update))

    def _finish(self, update: Update) -> None:
        """Wait for an update in memory, and end it, unless the step decides on it."""
        if update.home.speculative:
            update.home.finish(update)
            return
        self.queue.remove(update)
        try:
            update.home.finish(update)
        except BaseException as error:
            if update.running is not None:
                update.running.cancel()  # Ctrl-C may have interrupted the wait
            update.give_up(error)
            raise

    def finish(self, update: Update) -> None:
        """Finish an update in memory. Raises its error."""
        if update.running is not None:
            self.queue.finish_one(update.running)

    @property
    def updated_in_part(self) -> list[str]:
        """Names of parameters on disk whose update has begun and not ended."""
        return [] if self.disk is None else self.disk.updated_in_part

    def torn(self) -> set[ManagedParam]:
        """Return parameters of whose split masters a failed disk has lost halves."""
        return set() if self.disk is None else self.disk.torn()

    def progress(self) -> None:
        """Advance updates without waiting."""
        if self.queue.updates:
            self.queue.finish_done(on_disk=False)
        if self.disk is not None:
            self.disk.progress()

    def finish_running(self) -> None:
        """Finish the updates that have been started; deferred ones that have not begun stay deferred."""
        self.queue.finish(on_disk=False)
        self.queue.finish(on_disk=True)

    def complete(self, managed_params: Sequence[ManagedParam]) -> None:
        """Wait for updates of these parameters that are running or deferred. Raises the first error."""
        if not self.queue.updates:
            return
        chunks = [managed.shard_chunk for managed in managed_params]
        for chunk in chunks:
            chunk.finish_update()
        deferred = {chunk.index for chunk in chunks if chunk.deferred is not None}
        if deferred and self.disk is not None:
            self.disk.finish(deferred)  # together: pages of one are updated while those of others are read

    def close(self) -> None:
        """End all updates, and the worker threads."""
        if self.disk is not None:
            self.disk.cancel_running()
        self.queue.clear()
        if self.host is not None:
            self.host.close()
