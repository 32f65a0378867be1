"""Batches of token blocks, in an order that the seed fixes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from patrickstar.errors import CheckpointError, DataError


class Batches:
    """An endless stream of batches, int64 of shape ``(batch, sequence)``.

    The tokens are cut into blocks of ``sequence``; each pass over the blocks takes them in a new order drawn from
    ``seed``. Of ``processes`` each supports every so many-th batch, beginning with its ``rank``. Raises DataError where
    the tokens don't fill one block.
    """

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        sequence: int,
        batch: int,
        seed: int,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self._blocks = len(tokens) // sequence
        if self._blocks == 0:
            raise DataError(
                f"the data has {len(tokens)} tokens, less than one sequence of {sequence}; "
                "give more text with --data, or a shorter --sequence"
            )
        self._tokens = tokens
        self._sequence = sequence
        self._batch = batch
        self._seed = seed
        self._rank = rank
        self._processes = processes
        self._taken = 0
        """Blocks that all processes together have had."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self._order(self._taken)
        mine = slice(self._rank * self._batch, (self._rank + 1) * self._batch)
        while True:
            indices = [next(order) for _ in range(self._batch * self._processes)]
            self._taken += len(indices)
            yield torch.from_numpy(np.stack([self._block(index) for index in indices[mine]]))

    def state_dict(self) -> dict[str, Any]:
        """How far they have come, and in what."""
        return {"taken": self._taken, "order": self._kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, in batches of any size. Raises CheckpointError if these are blocks of something else."""
        if state["order"] != self._kind:
            raise CheckpointError(
                f"the checkpoint's run has had blocks of {state['order']}, and these are of {self._kind}; give the "
                f"same text, --sequence and --seed, or begin a new run with --model and what was exported"
            )
        self._taken = int(state["taken"])

    @property
    def _kind(self) -> dict[str, int]:
        return {"tokens": len(self._tokens), "sequence": self._sequence, "seed": self._seed}

    def _order(self, first: int) -> Iterator[int]:
        generator = np.random.default_rng(self._seed)
        passes, begun = divmod(first, self._blocks)
        for _ in range(passes):
            generator.permutation(self._blocks)
        while True:
            yield from generator.permutation(self._blocks)[begun:].tolist()
            begun = 0

    def _block(self, index: int) -> NDArray[np.int64]:
        start = index * self._sequence
        return self._tokens[start : start + self._sequence].astype(np.int64)
