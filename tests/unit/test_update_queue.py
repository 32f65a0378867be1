"""Ends of updates and of reductions, for whoever moves the memory that they use."""

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from late_transfer import LateTransfer

from patrickstar._hardware.transfer import Deferred, Transfer
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._params.chunk_comm import PendingReduction
from patrickstar._step.disk_optimizer_step import DiskOptimizerStep
from patrickstar._step.host_updates import HostUpdates
from patrickstar._step.update import Update
from patrickstar._step.update_dispatch import Updates
from patrickstar._step.update_queue import EndOfUpdate, UpdateQueue


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


def updates_with(running: Transfer, **home: Any) -> tuple[Updates, Update]:
    """Return an update in memory that runs, and the queue that it is in."""
    updates = Updates(Mock(), Mock(), UpdateQueue(), None, None)
    home |= {"copies": lambda chunks: [], "speculative": False}
    update = Update(0, {}, (), Mock(**home), running=running)
    updates.add(update)
    return updates, update


def test_parameters_are_reset_after_the_end_of_an_update_whose_wait_was_interrupted():
    events = []
    running = Mock(cancel=lambda: events.append("end"))
    interrupted, reset = Mock(side_effect=KeyboardInterrupt), lambda rules: events.append("reset")
    updates, update = updates_with(running, finish=interrupted, forget=reset)
    with pytest.raises(KeyboardInterrupt):
        updates.finish(update)
    assert events == ["end", "reset"]


def test_no_update_runs_beside_what_is_measured():
    running = LateTransfer("an update")
    updates, _ = updates_with(running, finish=lambda update: update.running.wait())
    page = LateTransfer("an update of a page")
    updates.queue.run(Update(1, {}, (), Mock(), lists=[Mock()]), page, [], page.wait)
    updates.finish_running()
    assert running.done and page.done and not updates.queue.updates


def test_no_page_is_updated_after_the_close_that_follows_an_error():
    """Also if kernels run beside operators themselves, and no worker thread ends with their updates."""
    pool, queue, begun, opened = WorkerPool(1, "update"), UpdateQueue(), threading.Event(), threading.Event()
    running = pool.submit([lambda stage: (begun.set(), opened.wait(20))], "an update of a page")
    assert begun.wait(20)
    disk = DiskOptimizerStep(Mock(), Mock(), Mock(), queue, None, Mock(live=[Mock(update=running)]))
    queue.run(Update(0, {}, (), Mock(), lists=[Mock()]), running, [], running.wait)
    timer = threading.Timer(0.1, opened.set)
    timer.start()
    Updates(Mock(), Mock(), queue, HostUpdates(Mock(), None), disk).close()
    assert running.done and not queue.runs(on_disk=True)
    timer.join()
    pool.close()
