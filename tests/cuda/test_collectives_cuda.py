"""NCCL's collectives with one process, which is all that one GPU can have: streams, dtypes, results in place."""

import pytest
import torch
import torch.distributed as dist
from cuda_cases import DEVICE, ON_GPU, marks

from patrickstar._distributed.collectives import collectives
from patrickstar._distributed.process_group import World

pytestmark = marks

NUMEL = 1 << 16
CUTS = (0, NUMEL)


@pytest.fixture
def begun(monkeypatch):
    """Collectives of a group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else DEVICE
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(device)
    made = collectives(world, device)
    yield made
    made.close()
    world.close()
    dist.destroy_process_group()


def numbers(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(dtype)
    return values.to(DEVICE)


def busy() -> None:
    """Keep the device busy, so that collectives have to wait for it."""
    if ON_GPU:
        torch.cuda._sleep(20_000_000)


def result(tensor: torch.Tensor, transfer) -> torch.Tensor:
    """Return what a tensor holds for computation that is ordered after a transfer."""
    getattr(transfer, "order", transfer.wait)()
    return tensor.cpu()


def test_a_gather_waits_for_what_computes_and_leaves_all_parts(begun):
    whole, values = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE), numbers()
    busy()
    begun.shard(whole, CUTS).copy_(values)
    assert torch.equal(result(whole, begun.gather(whole, CUTS)), values.cpu())


def test_a_part_is_sent(begun):
    whole = numbers()
    expected = whole.cpu().clone()
    own = begun.shard(whole, CUTS).cpu()
    assert torch.equal(result(whole, begun.send(own, whole, CUTS, [0])), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_reduction_in_place(begun, dtype):
    whole = numbers(dtype)
    expected = 2 * whole.cpu()
    busy()
    whole.mul_(2)
    assert torch.equal(result(whole, begun.reduce(whole, whole, CUTS, [0])), expected)


def test_a_reduction_in_fp32_of_16_bits(begun):
    whole = numbers()
    expected = whole.float().cpu()
    target = torch.zeros(NUMEL, device=DEVICE)
    assert torch.equal(result(target, begun.reduce(whole, target, CUTS, [0])), expected)


def test_a_reduction_to_the_host(begun):
    whole = numbers()
    target = torch.zeros(NUMEL, dtype=torch.float32)
    transfer = begun.reduce(whole, target, CUTS, [0])
    transfer.wait()
    assert torch.equal(target, whole.float().cpu())


@pytest.mark.skipif(not ON_GPU, reason="NCCL is a GPU's")
def test_a_group_that_gives_nothing_adds_zeros(begun):
    target = torch.ones(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    assert not result(target, begun.reduce(None, target, CUTS, [])).any()
