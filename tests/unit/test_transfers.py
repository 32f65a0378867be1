"""Every kind of transfer has all that a caller may ask of one, whatever moves its bytes."""

import pytest
import torch

from patrickstar._distributed.chunk_comm import COMPLETED, PendingReduction
from patrickstar._distributed.collectives import CollectiveTransfer
from patrickstar._dry_run.simulated_channels import SimulatedChannel, SimulatedClock
from patrickstar._memory import copy_streams as copies
from patrickstar._memory.copy_streams import StreamTransfer
from patrickstar._memory.worker_pool import Transfer, WorkerPool


class Event:
    """An event of a stream that has ended as soon as somebody waits for it."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


class ChunkComm:
    """Other processes that come as soon as they are asked to."""

    def __init__(self, reduction_of: list[PendingReduction]) -> None:
        self.reduction_of = reduction_of
        self.taken_back: list[int] = []

    def negotiate(self, want: object) -> None:
        self.reduction_of[0].collective = COMPLETED

    def cancel_reduction(self, index: int) -> None:
        self.taken_back.append(index)
        self.reduction_of[0].collective = COMPLETED


class Chunk:
    """What a reduction knows of a chunk."""

    index = 7

    def __repr__(self) -> str:
        return "param16[7]"


def on_a_stream() -> Transfer:
    return StreamTransfer(Event(), torch.device("cuda", 0), "param16[7]")


def on_a_thread() -> Transfer:
    movers = WorkerPool(1, "test", 4096)
    transfer = movers.submit([lambda stage: None], "param16[7]")
    transfer.movers = movers  # they live as long
    return transfer


def on_a_lane() -> Transfer:
    return SimulatedChannel("host to device", 1e9, SimulatedClock()).begin(1000, "param16[7]")


def of_a_collective() -> Transfer:
    return CollectiveTransfer(on_a_stream())


def of_gradients() -> Transfer:
    made: list[PendingReduction] = []
    made.append(PendingReduction(ChunkComm(made), Chunk()))
    return made[0]


KINDS = [on_a_stream, on_a_thread, on_a_lane, of_a_collective, of_gradients]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("end", ["wait", "cancel", "hasten and wait"])
def test_every_transfer_can_be_named_hastened_cancelled_and_waited_for(make, end):
    transfer = make()
    assert "param16[7]" in repr(transfer) and "param16[7]" in transfer.label
    if end.startswith("hasten"):
        transfer.prioritize()
    if end == "cancel":
        transfer.cancel()
    else:
        transfer.wait()
    assert transfer.done
    assert "param16[7]" in repr(transfer)


def test_a_transfer_of_nothing_has_ended():
    assert COMPLETED.done and "nothing" in repr(COMPLETED)
    for call in (COMPLETED.prioritize, COMPLETED.cancel, COMPLETED.wait):
        call()
    assert COMPLETED.done


def test_a_copy_on_a_stream_says_whether_it_is_under_way():
    transfer = on_a_stream()
    assert repr(transfer) == "Transfer('param16[7]', in flight)"
    transfer.wait()
    assert repr(transfer) == "Transfer('param16[7]', done)"


def test_a_copy_on_a_stream_is_waited_for_by_the_stream_that_computes(monkeypatch):
    transfer, waited = on_a_stream(), []

    class Stream:
        def wait_event(self, event: Event) -> None:
            waited.append(event)

    monkeypatch.setattr(copies.torch.cuda, "current_stream", lambda device: Stream())
    transfer.order()
    assert waited == [transfer.event] and not transfer.done
