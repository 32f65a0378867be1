"""Batches of token blocks, in an order determined by the seed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from patrickstar.errors import CheckpointError, DataError


class BatchSampler:
    """Endless stream of batches: int64 tensors of shape ``(batch, sequence)``.

    The tokens are cut into blocks of ``sequence``, which each pass visits in a new order drawn from ``seed``. Of
    ``processes`` consecutive batches, each process receives the one at its ``rank``.

    Raises:
        DataError: The tokens do not fill one block.
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
                "provide more text with --data, or use a shorter --sequence"
            )
        self._tokens = tokens
        self._sequence = sequence
        self._batch = batch
        self._seed = seed
        self._rank = rank
        self._processes = processes
        self._consumed = 0
        """Number of blocks that all processes together have consumed."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self._order(self._consumed)
        mine = slice(self._rank * self._batch, (self._rank + 1) * self._batch)
        while True:
            indices = [next(order) for _ in range(self._batch * self._processes)]
            self._consumed += len(indices)
            yield torch.from_numpy(np.stack([self._block(index) for index in indices[mine]]))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, and the properties that determine the stream."""
        return {"taken": self._consumed, "order": self._source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, with any batch size. Raise CheckpointError if the stream differs."""
        if state["order"] != self._source:
            raise CheckpointError(
                f"the checkpoint belongs to a run over {state['order']}, and this run is over {self._source}; use the "
                f"same text, --sequence and --seed, or start a new run from an export with --model"
            )
        self._consumed = int(state["taken"])

    @property
    def _source(self) -> dict[str, int]:
        return {"tokens": len(self._tokens), "sequence": self._sequence, "seed": self._seed}

    def _order(self, first: int) -> Iterator[int]:
        generator = np.random.default_rng(self._seed)
        passes, first_block = divmod(first, self._blocks)
        for _ in range(passes):
            generator.permutation(self._blocks)
        while True:
            yield from generator.permutation(self._blocks)[first_block:].tolist()
            first_block = 0

    def _block(self, index: int) -> NDArray[np.int64]:
        start = index * self._sequence
        return self._tokens[start : start + self._sequence].astype(np.int64)
