"""Processes that are linked by collectives inside of operators, and therefore decide alike."""

from collections.abc import Hashable, Sequence

import torch
import xxhash

from patrickstar._distributed.deadlock_watch import own_call
from patrickstar._distributed.process_group import RankGroup
from patrickstar.errors import PeerError

# [Note: linked processes]
# With tensor or expert parallelism an operator waits for other processes. If one of them waited for memory, or for a
# chunk that only it has dropped, while the others are inside such an operator, none could continue. So processes that
# are linked by operators make the same accesses, gathers, evictions and reductions in the same order: what these
# decisions depend on is the same in all of them. Their layouts are equal, a budget is the smallest of theirs, and
# measured non-model bytes are the largest, exchanged whenever they are measured. A plan is followed if each of them has
# one for its inputs. No decision depends on whether a transfer has ended already. A chunk is reduced after its last use
# in backward, whether or not it has gradients: which experts get tokens differs. Experts, whose operators differ for
# the same reason, get one window around their module.
#
# Data-parallel processes that are not linked need not decide alike: they negotiate ([Note: coordination steps]).


class LinkedProcesses:
    """Exchanges what linked processes base their decisions on; all of them make the same calls."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def largest(self, nbytes: int, accesses: int = 0) -> int:
        """Return the largest of the processes' values.

        Args:
            nbytes: Value of this process.
            accesses: Hash of all chunks that it has accessed so far.

        Raises:
            PeerError: The processes have accessed different chunks.
        """
        rows = self.group.all_gather(torch.tensor([nbytes, accesses], dtype=torch.int64, device="cpu"))
        if (rows[:, 1] != accesses).any():
            raise PeerError(
                f"ranks {', '.join(map(str, self.group.ranks))} are linked by operators that contain collectives "
                f"(tensor or expert parallelism), so all have to run the same operators, but they have used different "
                f"parameters, last in {own_call()}: only some have taken a branch, or made a call"
            )
        return int(rows[:, 0].max())

    def largest_each(self, values: Sequence[int]) -> list[int]:
        """Return the largest of the processes' values, element by element."""
        rows = self.group.all_gather(torch.tensor(values, dtype=torch.int64, device="cpu"))
        largest: list[int] = rows.max(0).values.tolist()
        return largest

    def common(self, key: Hashable) -> Hashable:
        """Return a key that stands for the keys of all processes."""
        own = xxhash.xxh64_intdigest(repr(key).encode()) >> 1  # in 63 bits
        return tuple(self.group.all_gather(torch.tensor([own], dtype=torch.int64, device="cpu"))[:, 0].tolist())
