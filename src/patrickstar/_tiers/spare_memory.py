"""Spare blocks of the host, which updates take when they begin."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from patrickstar._hardware.transfer import Transfer
from patrickstar._tiers.host_arena import ArenaBlock

# [Note: spare blocks]
# A spare block holds the results of an update before it is known whether they count: they may become the host copy of
# a chunk (`HostTier.replace_block`), or be given up at any time. Spare blocks take what the budget leaves beside all
# that the last step needed, and no more than updates can use (`HostTier.spare_use_bytes`). They are released before
# anything else lacks room.
#
# Memory for them is added as they ask for it, since on a GPU all of it is page-locked, used or not. Each piece is as
# large as all before together: few pieces, which are quick to lock and to search, and never more than twice what was
# asked for, nor more than updates can use.

Blocks = Sequence[ArenaBlock]
"""Spare blocks for the new content of one chunk of each list."""


@dataclass(eq=False)
class SpareUse:
    """Use of spare blocks by an update."""

    sizes: tuple[int, ...]
    """Bytes of its blocks."""
    running: Transfer | None = None
    """The update."""
    blocks: Blocks | None = None
    """Its blocks from its begin on, unless a newer one or other data took them."""


class SpareMemory:
    """Spare blocks that updates take when they begin, in any thread. See [Note: spare blocks].

    An update that finds none takes those of the oldest update that has ended, whose results are lost by that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Blocks] = []
        self._uses: list[SpareUse] = []
        self.replaced = 0
        """Number of updates that lost their blocks to newer ones, or found none."""

    @property
    def uses(self) -> list[SpareUse]:
        """Updates that have taken blocks, and may lose them, the oldest first."""
        with self._lock:
            return list(self._uses)

    @property
    def is_empty(self) -> bool:
        """True if there are no blocks that an update could take, now or once another has ended."""
        with self._lock:
            return not self._free and not self._uses

    def add(self, blocks: Blocks) -> None:
        """Add free blocks."""
        with self._lock:
            self._free.append(blocks)

    def take(self, use: SpareUse) -> bool:
        """Give blocks to an update that begins. Return False if there are none for it."""
        with self._lock:
            blocks = next((blocks for blocks in self._free if _sizes(blocks) == use.sizes), None)
            if blocks is not None:
                self._free.remove(blocks)
            else:
                self.replaced += 1
                ended = (each for each in self._uses if each.running is not None and each.running.done)
                oldest = next((each for each in ended if each.sizes == use.sizes), None)
                if oldest is None:
                    return False
                self._uses.remove(oldest)
                blocks, oldest.blocks = oldest.blocks, None
            use.blocks = blocks
            self._uses.append(use)
            return True

    def keep(self, use: SpareUse) -> bool:
        """Let an update keep its blocks from now on. Return False if it has none."""
        with self._lock:
            if use in self._uses:
                self._uses.remove(use)
            return use.blocks is not None

    def give_back(self, use: SpareUse | None = None) -> Blocks | None:
        """Return the blocks of an update that has ended or was cancelled, or free ones; None without any."""
        with self._lock:
            if use is None:
                return self._free.pop() if self._free else None
            if use in self._uses:
                self._uses.remove(use)
            blocks, use.blocks = use.blocks, None
            return blocks


def _sizes(blocks: Blocks) -> tuple[int, ...]:
    return tuple(block.nbytes for block in blocks)
