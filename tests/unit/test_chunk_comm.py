"""Memory of shards that collectives in flight read or write."""

from unittest.mock import MagicMock, Mock

import pytest
import torch
from late_transfer import LateTransfer

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._layout.schema import NODE16, SHARD16
from patrickstar._params.chunk_comm import ChunkComm
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.host_arena import ALIGN_BYTES

NUMEL = ALIGN_BYTES // 4


@pytest.fixture
def comm():
    """Return the communication of a process, rank 0, whose shards have no parameters."""
    manager = ChunkManager(torch.device("cpu"), 4 * ALIGN_BYTES, 4 * ALIGN_BYTES, poison=True)
    comm = ChunkComm(MagicMock(**{"group.rank": 0}), None)
    comm.attach(Mock(manager=manager, by_chunk={0: []}), "16-bit")
    yield comm
    manager.close()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_sum_of_gradients_is_there_once_its_reduction_was_finished(comm, tier):
    """Also if this process has none of these gradients, and has requested nothing that it could wait for."""
    own = comm._manager.new_chunk(SHARD16, 0, NUMEL, "float32", tier)
    reduce = lambda whole, target, ranks: LateTransfer("a reduction", lambda: target.fill_(3))  # noqa: E731
    comm.transports[0] = Mock(reduce=reduce)
    comm.start_reduction(0, ranks=(1,))
    comm.finish_reduction(0)
    assert (own.current(own.whole) == 3).all()


def test_the_shard_of_a_replica_is_renewed_once_earlier_gathers_have_read_it(comm):
    node, sent = comm._manager.new_chunk(NODE16, 0, NUMEL, "float32", Tier.HOST), torch.empty(NUMEL)
    node.host.reader = LateTransfer("a gather by another process", lambda: sent.copy_(node._host_view(node.whole)))
    renew = lambda own, whole, ranks, refresh: node._host_view(node.whole).fill_(9)  # noqa: E731
    comm.transports[0] = Mock(gather=renew, reads_shard=lambda ranks, refresh: False)
    comm.start_gather(0, ranks=(1,), refresh=True)
    node.host.settle(write=True)
    assert (sent == 0).all() and (node.on_host(node.whole) == 9).all()
