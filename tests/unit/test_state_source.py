"""Choice of the saved process whose generators, buffers and user state a process restores."""

import pytest

from patrickstar._checkpoint.state_source import StateSource

ALONE, TWO, FOUR = [0], [0, 1], [0, 1, 2, 3]
TENSORS, TENSORS_OUTSIDE, ONE_BATCH = [0, 0, 1, 1], [0, 1, 0, 1], [0, 0]


@pytest.mark.parametrize(
    ("saved", "current", "state", "generators"),
    [
        (TWO, TWO, [0, 1], [0, 1]),
        (TENSORS, TENSORS, [0, 1, 2, 3], [0, 1, 2, 3]),
        # another number of processes, without tensor parallelism
        (TWO, FOUR, [0, 0, 0, 0], [0, 1, None, None]),
        (FOUR, TWO, [0, 0], [0, 1]),
        (TWO, ALONE, [0], [0]),
        # as many batches on another mesh
        (TWO, TENSORS, [0, 0, 1, 1], [0, 0, 1, 1]),
        (TENSORS, TWO, [0, 2], [0, 2]),
        (TENSORS, TENSORS_OUTSIDE, [0, 2, 0, 2], [0, 2, 0, 2]),
        (ALONE, ONE_BATCH, [0, 0], [0, 0]),
        (ONE_BATCH, ALONE, [0], [0]),
        # another number of batches
        (FOUR, TENSORS, [0, 0, 0, 0], [0, 0, 1, 1]),
        (TENSORS, FOUR, [0, 0, 0, 0], [0, 2, None, None]),
    ],
)
def test_state_follows_the_batch(saved, current, state, generators):
    chosen = [StateSource.of(saved, current, rank) for rank in range(len(current))]
    assert [source.state for source in chosen] == state
    assert [source.generators for source in chosen] == generators
