"""Ends of updates and of reductions, for whoever moves the memory that they use."""

from unittest.mock import Mock

import pytest

from patrickstar._hardware.transfer import Deferred
from patrickstar._params.chunk_comm import PendingReduction
from patrickstar._step.update_queue import EndOfUpdate


@pytest.mark.parametrize("how", [EndOfUpdate.wait, EndOfUpdate.cancel])
def test_memory_of_an_update_moves_after_its_end_which_raises_no_error_here(how):
    ended = []

    def end() -> None:
        ended.append(True)
        raise ValueError("whoever finishes the update raises it")

    how(EndOfUpdate(Deferred("an update", end), "param16[0]"))
    assert ended == [True]


def test_a_reduction_that_has_started_is_not_withdrawn():
    comm, collective = Mock(), Mock()
    reduction = PendingReduction(comm, Mock())
    reduction.cancel()
    comm.cancel_reduction.assert_called_once()
    reduction.collective = collective
    reduction.cancel()
    collective.cancel.assert_called_once()
    comm.cancel_reduction.assert_called_once()
