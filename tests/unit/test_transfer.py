"""Every kind of transfer implements the whole `Transfer` interface."""

from types import SimpleNamespace

import pytest
import torch

from patrickstar._distributed.gloo_collectives import CollectiveTransfer
from patrickstar._dry_run.simulated_channels import SimulatedChannel, SimulatedClock
from patrickstar._hardware.transfer import CompletedTransfer, Transfer
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._params.chunk_comm import PendingReduction
from patrickstar._schedule.coordination import Agreement
from patrickstar._tiers.chunk import Chunk
from patrickstar._tiers.copy_streams import StreamTransfer


class ChunkComm:
    """Fake communication whose other processes answer at once."""

    def __init__(self, reduction_of: list[PendingReduction]) -> None:
        self.reduction_of = reduction_of
        self.cancelled: list[int] = []

    def fits_host(self, chunk: object) -> bool:
        return True

    def negotiate(self, want: object) -> Agreement:
        self.reduction_of[0].collective = CompletedTransfer("nothing")
        return Agreement((), (), synchronized=False)

    def cancel_reduction(self, index: int) -> None:
        self.cancelled.append(index)
        self.reduction_of[0].collective = CompletedTransfer("nothing")


def on_a_stream() -> Transfer:
    event = SimpleNamespace(ended=False, query=lambda: event.ended)
    accelerator = SimpleNamespace(wait=lambda event: vars(event).update(ended=True))
    return StreamTransfer(accelerator, event, "param16[7]")


def on_a_thread() -> Transfer:
    pool = WorkerPool(1, "test", 4096)
    transfer = pool.submit([lambda staging: None], "param16[7]")
    transfer.pool = pool  # keeps the pool alive
    return transfer


def on_a_simulated_channel() -> Transfer:
    return SimulatedChannel("host to device", 1e9, SimulatedClock()).begin(1000, "param16[7]")


def of_a_collective() -> Transfer:
    return CollectiveTransfer(on_a_stream())


def of_gradients() -> Transfer:
    reductions: list[PendingReduction] = []
    chunk = Chunk("param16", 7, 4, "float32", torch.device("cpu"))
    reductions.append(PendingReduction(ChunkComm(reductions), chunk))
    return reductions[0]


KINDS = [on_a_stream, on_a_thread, on_a_simulated_channel, of_a_collective, of_gradients]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("end", ["wait", "cancel", "prioritize and wait"])
def test_every_transfer_has_a_name_and_can_be_prioritized_cancelled_and_waited_for(make, end):
    transfer = make()
    assert "param16[7]" in repr(transfer) and "param16[7]" in transfer.label
    if end.startswith("prioritize"):
        transfer.prioritize()
    if end == "cancel":
        transfer.cancel()
    else:
        transfer.wait()
    assert transfer.done
    assert "param16[7]" in repr(transfer)


def test_empty_transfer_is_done():
    transfer = CompletedTransfer("nothing")
    assert transfer.done and "nothing" in repr(transfer)
    for call in (transfer.prioritize, transfer.cancel, transfer.wait):
        call()
    assert transfer.done


def test_order_makes_the_compute_stream_wait():
    transfer, waited = on_a_stream(), []

    transfer.accelerator.order = waited.append
    transfer.order()
    assert waited == [transfer.event] and not transfer.done
