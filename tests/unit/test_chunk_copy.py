"""Copies of a chunk: who waits for what uses their memory."""

import pytest

from patrickstar._hardware.transfer import CompletedTransfer
from patrickstar._tiers.chunk import Copy, DiskCopy, HostCopy


class Recorded(CompletedTransfer):
    """Transfer that records when it is waited for."""

    def __init__(self, label: str, log: list[str], done: bool = False) -> None:
        super().__init__(label)
        self._log, self._done = log, done

    @property
    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        self._log.append(self.label)


@pytest.fixture
def log() -> list[str]:
    return []


def in_use(log: list[str]) -> Copy:
    """Return a copy that everything uses at once."""
    copy = HostCopy()
    copy.writer, copy.reader = Recorded("writer", log), Recorded("reader", log)

    def end_update() -> None:
        copy.end_update = None
        log.append("update")

    copy.end_update, copy.end_save = end_update, lambda: log.append("save")
    return copy


def test_the_host_reads_a_copy_once_it_has_been_written_and_writes_it_once_no_transfer_reads_it(log):
    copy = in_use(log)
    for _ in range(2):  # each transfer is waited for once
        copy.settle()
        assert log == ["writer"] and copy.writer is None and copy.reader is not None
    copy.settle(write=True)
    assert log == ["writer", "reader"] and copy.end_update is not None, "updates are ended by who needs their results"


def test_memory_is_freed_or_moved_once_nothing_uses_it(log):
    copy = in_use(log)
    for _ in range(2):
        copy.vacate()
        assert log == ["update", "writer", "reader", "save"]


def test_an_update_that_ends_may_start_a_copy_which_is_waited_for_too(log):
    copy = in_use(log)
    copy.writer = None

    def end_update() -> None:
        copy.end_update, copy.reader = None, Recorded("renewal", log)

    copy.end_update = end_update
    copy.vacate()
    assert log == ["renewal", "save"]


def test_who_settles_a_copy_says_how_it_waits(log):
    copy, waited = in_use(log), []
    copy.settle(write=True, wait=lambda transfer: waited.append(transfer.label))
    assert waited == ["writer", "reader"] and not log


def test_pages_are_read_after_writes_and_written_after_reads(log):
    copy = DiskCopy()
    copy.reads = [Recorded("read", log)]
    copy.writes = {0: Recorded("write", log), 512: Recorded("done", log, done=True)}
    assert copy.has_writes and copy.writes_page(0)
    assert not copy.writes_page(512) and not copy.writes_page(1024)
    copy.settle()
    assert log == ["write", "done"]
    copy.settle(write=True)
    assert log == ["write", "done", "read", "write", "done"]
