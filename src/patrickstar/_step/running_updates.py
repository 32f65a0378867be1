"""Updates that worker threads run beside the training thread, and the chunks that these use."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._hardware.transfer import Transfer
from patrickstar._tiers.chunk import Chunk, Copy

# [Note: running updates]
# `optimizer.step()` starts updates and returns. An update counts as running until the training thread has finished it:
# at the end of an operator if it has ended by then, or before whatever looks at its parameters. The chunks that it
# reads or writes may be chosen for any move meanwhile, and it is finished before they move (`Copy.end_update`): no
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
class _Entry:
    chunks: Sequence[Chunk]
    copies: Sequence[Copy]
    finish: Callable[[], None]


class RunningUpdates:
    """Updates in the order in which they were started. See [Note: running updates].

    Args:
        updaters: Where its id is while it has updates.
        in_order: An update is finished after all that were started before it.
    """

    def __init__(self, updaters: set[int], in_order: bool = False) -> None:
        self.updaters, self.in_order = updaters, in_order
        self._entries: dict[Transfer, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, update: Transfer, chunks: Sequence[Chunk], finish: Callable[[], None], renewed: Chunk | None = None
    ) -> None:
        """Add an update that has been started.

        Args:
            chunks: The chunks in memory that it uses.
            finish: Called in place of `update.wait`.
            renewed: Chunk on the device whose host copy it writes.
        """
        copies = [chunk.in_use for chunk in chunks] + ([] if renewed is None else [renewed.host])
        self._entries[update] = _Entry(chunks, copies, finish)
        self.updaters.add(id(self))
        for copy in copies:
            copy.end_update = partial(self.finish_one, update)

    def finish_one(self, update: Transfer) -> None:
        """Finish an update, and those before it if they are in order. Raises the error of the first that failed."""
        while self.in_order and update in self._entries:
            self.finish_first()
        if update in self._entries:
            update.prioritize()
            self._remove(update).finish()

    def reorder(self, key: Callable[[int], int]) -> None:
        """Sort updates by this key of their chunk index: the order in which `finish_done` looks at them."""
        self._entries = dict(sorted(self._entries.items(), key=lambda item: key(item[1].chunks[0].index)))

    def finish_done(self) -> None:
        """Finish the first updates that have ended, without waiting."""
        while self._entries and next(iter(self._entries)).done:
            self.finish_first()

    def finish_first(self) -> None:
        """Finish the first update. Raises its error."""
        self._remove(next(iter(self._entries))).finish()

    def finish(self) -> None:
        """Finish all updates. Raises the error of the first that failed, once all have ended."""
        errors = []
        while self._entries:
            interruption_point()
            try:
                self.finish_first()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def discard(self, update: Transfer) -> None:
        """Forget an update, if it is still here; the caller ends it."""
        if update in self._entries:
            self._remove(update)

    def clear(self) -> None:
        """Forget all updates; the caller ends them."""
        for update in list(self._entries):
            self._remove(update)

    def _remove(self, update: Transfer) -> _Entry:
        entry = self._entries.pop(update)
        if not self._entries:
            self.updaters.discard(id(self))
        for copy in entry.copies:
            later = [update for update, other in self._entries.items() if copy in other.copies]
            copy.end_update = partial(self.finish_one, later[-1]) if later else None
        return entry
