"""Roster: an agreement on which processes belong together, in a store that outlives them."""

import time
from collections.abc import Sequence
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store

from patrickstar._distributed.torch_errors import first_line
from patrickstar.errors import PeerError

POLL_S = 0.05
LISTED_RANKS = 8
"""Number of ranks that an error message lists."""

# [Note: rosters]
# The store of torchrun's agent outlives the processes. After a restart it still has what the earlier processes wrote,
# such as addresses that nobody listens on, and no variable tells the generations apart: each agent counts its own
# restarts. So the processes first agree on a roster, a list of one process per rank:
#
# 1. Each process stores a new random ID under its rank ("member/RANK").
# 2. Rank 0 reads the IDs of all ranks, and publishes them under the name of a new roster ("roster/RANK").
# 3. A process that finds its own ID acknowledges this roster ("ack/RANK"). A process that has ended acknowledges
#    nothing. When its successor has stored an ID, rank 0 publishes another roster.
# 4. When all others have acknowledged, rank 0 acknowledges, too. This concludes the roster.
#
# The process group then has a store of its own, whose keys begin with the name of the roster, and so reads nothing of
# an earlier process. The keys of the agreement, three per rank, are overwritten by each generation, and those of
# earlier groups are deleted.
#
# A process may end after its acknowledgement. The agent of its machine then ends the others there, but those on another
# machine may wait for it without end, as long as they have no connection that breaks. So its successor writes into the
# store of the earlier group ("replaced"), and processes that wait for all others read it (`group_creation.py`).

_AGREEMENT = "patrickstar/agreement"
_GROUPS = "patrickstar/groups/"


class RosterAgreement:
    """One process's part in the agreement on a roster. See [Note: rosters].

    Args:
        store: Store of all processes, which may have entries of earlier ones.
        rank, size: Rank of this process, and number of processes.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._shared, self._rank, self._size = store, rank, size
        self._store = PrefixStore(_AGREEMENT, store)
        self._id = uuid4().hex
        self._name = ""
        """Name of the roster that this process has published or acknowledged last."""
        self._published: list[str] = []
        """IDs in that roster; in rank 0 only."""

    def agree(self, timeout_s: float) -> Store:
        """Wait until all processes have acknowledged one roster, and return the store of its process group.

        Raises:
            PeerError: Processes did not join in time, or another process has joined under this one's rank.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self.start()
            while not self.advance():
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"rank {self._rank} has waited {timeout_s:g} s, and {format_ranks(self._absent())} of "
                        f"{self._size} processes did not join: check that torchrun runs on all machines with the same "
                        f"rendezvous, and that each reaches MASTER_ADDR, or wait longer with ps.join(timeout=...)"
                    )
                time.sleep(POLL_S)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._rank} of {self._size} can't join the others: the store at MASTER_ADDR does not answer "
                f"any more ({first_line(error)}); restart all processes"
            ) from error
        return self.group_store

    @property
    def group_store(self) -> Store:
        """Store of the process group, once the roster is concluded."""
        return self._group_store(self._name)

    def start(self) -> None:
        """Store the ID of this process, and mark the earlier group of its rank as replaced."""
        if earlier := self._read(f"roster/{self._rank}").partition(" ")[0]:
            group_prefix(self._group_store(earlier)).set("replaced", str(self._rank))
        self._store.set(f"member/{self._rank}", self._id)

    def advance(self) -> bool:
        """Do this process's next part, without a wait. Return True once the roster is concluded."""
        return self._conclude() if self._rank == 0 else self._acknowledge()

    def delete_earlier(self) -> None:
        """Delete the keys of earlier groups: among others n addresses of each of n processes."""
        if not hasattr(self._shared, "list_keys"):
            return  # an older version of PyTorch: the keys stay, of one more group after each restart
        for key in self._shared.list_keys():
            if key.startswith(_GROUPS) and not key.startswith(f"{_GROUPS}{self._name}/"):
                self._shared.delete_key(key)

    def _group_store(self, name: str) -> Store:
        return PrefixStore(_GROUPS + name, self._shared)

    def _conclude(self) -> bool:
        """Publish a roster whenever the processes have changed; return True once all others have acknowledged it."""
        members = self._read_all("member")
        if members is None:
            return False
        self._check_rank(members[0])
        if members != self._published:
            self._published, self._name = members, uuid4().hex
            for key, member in zip(self._keys("roster"), members, strict=True):
                self._store.set(key, f"{self._name} {member}")
        acknowledged = self._read_all("ack", first=1)
        if acknowledged is None or any(name != self._name for name in acknowledged):
            return False
        group_prefix(self._group_store(self._name)).set("joined", "")
        self._store.set("ack/0", self._name)
        return True

    def _acknowledge(self) -> bool:
        """Acknowledge the newest roster with this process; return True once rank 0 has concluded it."""
        self._check_rank(self._read(f"member/{self._rank}"))
        name, _, member = self._read(f"roster/{self._rank}").partition(" ")
        if member != self._id:
            return False
        if name != self._name:
            self._name = name
            self._store.set(f"ack/{self._rank}", name)
        return self._read("ack/0") == name

    def _check_rank(self, member: str) -> None:
        if member != self._id:
            raise PeerError(
                f"another process has joined as rank {self._rank} since this one did: this one is left over from an "
                f"earlier start, or two launches have the same MASTER_ADDR and MASTER_PORT"
            )

    def _absent(self) -> list[int]:
        """Return the ranks that the others wait for."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        if none := [rank for rank in others if not self._read(f"member/{rank}")]:
            return none
        newest, _, member = self._read(f"roster/{self._rank}").partition(" ")
        if member != self._id:
            return [0]  # it would have published a roster with this process
        return [rank for rank in others if rank and self._read(f"ack/{rank}") != newest] or [0]

    def _keys(self, kind: str, first: int = 0) -> list[str]:
        return [f"{kind}/{rank}" for rank in range(first, self._size)]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_all(self, kind: str, first: int = 0) -> list[str] | None:
        """Return the entries of all ranks from `first` on; None if one has none yet."""
        keys = self._keys(kind, first)
        return [value.decode() for value in self._store.multi_get(keys)] if self._store.check(keys) else None


def group_prefix(store: Store) -> Store:
    """Return the part of a process group's store that is this library's."""
    return PrefixStore("patrickstar", store)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message, the first ones of many."""
    listed = ", ".join(map(str, ranks[:LISTED_RANKS]))
    more = f" and {len(ranks) - LISTED_RANKS} more" if len(ranks) > LISTED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
