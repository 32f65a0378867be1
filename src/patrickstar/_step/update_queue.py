"""Updates that exist, the parts of them that run beside the training thread, and the memory that these use."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._hardware.transfer import Deferred, Transfer
from patrickstar._step.update import Update
from patrickstar._tiers.chunk import Copy

# [Note: running updates]
# `optimizer.step()` starts updates and returns. An update counts as running until the training thread has finished it:
# at the end of an operator if it has ended by then, or before whatever looks at its parameters. The chunks that it
# reads or writes may be chosen for any move meanwhile, and it is finished before they move (`Copy.update`): no
# choice of chunks depends on the speed of a thread.
#
# One thread runs updates in the order in which the next forward uses the parameters, as far as it is known: the step
# starts them in this order; backward, which completes gradients in the opposite order, starts each before those that
# wait. An update that the training thread needs is moved ahead of all others. Pages of a chunk on disk are updated, and
# finished, in their order.


class UpdateGroup(Transfer):
    """Updates that were started together, as one."""

    label = "an update on the host"

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        """True once all have ended."""
        return all(part.done for part in self.parts)

    def prioritize(self) -> None:
        """Run them before others that wait."""
        for part in reversed(self.parts):
            part.prioritize()

    def withdraw(self) -> bool:
        """Cancel them if they have not begun; only a single one can be known not to."""
        return len(self.parts) == 1 and self.parts[0].withdraw()

    def cancel(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        for part in self.parts:
            part.cancel()

    def wait(self) -> None:
        """Wait for all, and raise the first error."""
        for part in self.parts:
            part.wait()


class EndOfUpdate(Transfer):
    """The end of an update, for whoever moves memory that it uses. Whoever finishes the update raises its error."""

    def __init__(self, running: Transfer, label: str) -> None:
        self.label = label
        self._running = running

    @property
    def done(self) -> bool:
        return self._running.done

    def wait(self) -> None:
        with suppress(Exception):
            self._running.wait()

    def prioritize(self) -> None:
        self._running.prioritize()

    def cancel(self) -> None:
        self.wait()


@dataclass(eq=False)
class _RunningPart:
    """All of an update in memory, or a page of one on disk."""

    update: Update
    copies: Sequence[Copy]
    finish: Callable[[], None]
    end: Transfer
    """Its end, for all that need one of the copies."""

    @property
    def on_disk(self) -> bool:
        return bool(self.update.lists)


class UpdateQueue:
    """Updates that have not ended, and speculative ones that the step has not decided on. See [Note: running updates].

    Updates in memory run as a whole, in the order in which they were started; those on disk page by page.
    """

    def __init__(self) -> None:
        self.updates: list[Update] = []
        """All of them; those on disk in the order in which their pages are read."""
        self._parts: dict[Transfer, _RunningPart] = {}

    def run(self, update: Update, running: Transfer, copies: Sequence[Copy], finish: Callable[[], None]) -> None:
        """Add what runs of an update.

        Args:
            copies: What it uses.
            finish: Called in place of `running.wait`.
        """
        end = Deferred(running.label, partial(self.finish_one, running))
        self._parts[running] = _RunningPart(update, copies, finish, end)
        for copy in copies:
            copy.update = end

    def runs(self, *, on_disk: bool) -> bool:
        """Return whether any update in memory, or page of one on disk, runs."""
        return self._first(on_disk) is not None

    def _first(self, on_disk: bool) -> Transfer | None:
        return next((running for running, part in self._parts.items() if part.on_disk is on_disk), None)

    def finish_one(self, running: Transfer) -> None:
        """Finish what runs; a page after those that began before. Raises the error of the first that failed."""
        if running in self._parts and self._parts[running].on_disk:
            while running in self._parts:
                self.finish_first(on_disk=True)
        elif running in self._parts:
            running.prioritize()
            self._remove(running).finish()

    def reorder(self, key: Callable[[int], int]) -> None:
        """Sort updates in memory by this key of their chunk index: the order in which `finish_done` looks at them."""
        order = sorted(self._parts.items(), key=lambda item: 0 if item[1].on_disk else key(item[1].update.index))
        self._parts = dict(order)

    def finish_done(self, *, on_disk: bool) -> None:
        """Finish the first updates in memory, or pages, that have ended, without waiting."""
        while (first := self._first(on_disk)) is not None and first.done:
            self.finish_first(on_disk=on_disk)

    def finish_first(self, *, on_disk: bool) -> None:
        """Finish the first update in memory, or page. Raises its error."""
        if (first := self._first(on_disk)) is not None:
            self._remove(first).finish()

    def finish(self, *, on_disk: bool) -> None:
        """Finish what runs in memory, or of pages. Raises the error of the first that failed, once all have ended."""
        errors = []
        while self.runs(on_disk=on_disk):
            interruption_point()
            try:
                self.finish_first(on_disk=on_disk)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def remove(self, update: Update) -> None:
        """Let an update be in the queue no more, if it is; the caller ends it."""
        if update in self.updates:
            self.updates.remove(update)
        if update.running is not None:
            self.discard(update.running)

    def discard(self, running: Transfer) -> None:
        """Forget what runs, if it is in the queue; the caller ends it."""
        if running in self._parts:
            self._remove(running)

    def clear(self) -> None:
        """Forget all that runs; the caller ends it. Updates on disk stay, for who asks what they have done."""
        for running in list(self._parts):
            self._remove(running)
        self.updates = [update for update in self.updates if update.lists]

    def _remove(self, running: Transfer) -> _RunningPart:
        part = self._parts.pop(running)
        for copy in part.copies:
            copy.update = next((other.end for other in reversed(self._parts.values()) if copy in other.copies), None)
        return part
