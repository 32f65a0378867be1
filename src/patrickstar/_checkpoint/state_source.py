"""Choice of the saved process whose random generators, buffers and user state a process restores."""

from collections.abc import Sequence
from dataclasses import dataclass

# [Note: state of another mesh]
# Random generators, buffers and the user's state belong to a batch rather than to a process: processes that share a
# batch by tensor parallelism draw the same random numbers, and the position of a data loader is that of one batch. If
# the run continues on the same mesh, each process restores exactly what it saved. On another mesh it restores what the
# first process that computed its batch saved. A position of one of four batches has no meaning among two, so if the
# number of batches differs, all restore the buffers and the user's state of rank 0, and of the generators those that
# were saved for their batch: a process with a batch that no process computed keeps its own.


@dataclass(frozen=True)
class StateSource:
    """Saved processes whose state a process restores. See [Note: state of another mesh].

    Attributes:
        state: Rank that saved the buffers and the user's state.
        generators: Rank that saved the random generators; None to keep the current ones.
    """

    state: int
    generators: int | None

    @classmethod
    def of(cls, saved: Sequence[int], current: Sequence[int], rank: int) -> "StateSource":
        """Choose for the process `rank`.

        Args:
            saved: Number of the batch that each process computed when the checkpoint was written, by rank.
            current: Number of the batch that each process computes now, by rank.
            rank: Rank of this process.
        """
        if list(saved) == list(current):
            return cls(rank, rank)
        same_batch = next((other for other, batch in enumerate(saved) if batch == current[rank]), None)
        as_many = max(saved) == max(current)
        return cls(same_batch if as_many and same_batch is not None else 0, same_batch)
