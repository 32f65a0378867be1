"""NCCL collectives with one process, the most that one GPU allows: streams, dtypes, in-place results."""

import pytest
import torch
import torch.distributed as dist
from cuda_cases import DEVICE, HAS_ACCELERATOR, ON_GPU, marks

from patrickstar._distributed.collectives import collectives
from patrickstar._distributed.process_group import World
from patrickstar._memory.hardware import Hardware

pytestmark = marks

NUMEL = 1 << 16
CUTS = (0, NUMEL)


@pytest.fixture
def group(monkeypatch):
    """Provide the collectives of a process group of size one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    accelerator = Hardware(DEVICE).accelerator
    device = DEVICE if accelerator is None else accelerator.device
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = World(device)
    group = collectives(world, accelerator)
    yield group
    group.close()
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
    """Return the tensor as computation ordered after the transfer sees it."""
    getattr(transfer, "order", transfer.wait)()
    return tensor.cpu()


def test_a_gather_waits_for_computation_and_returns_all_shards(group):
    whole, values = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE), numbers()
    busy()
    assert torch.equal(result(whole, group.all_gather(values, whole, CUTS)), values.cpu())


def test_a_shard_is_sent(group):
    whole, own = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE), numbers().cpu()
    assert torch.equal(result(whole, group.gather_to(own, whole, CUTS, [0])), own)


def test_a_shard_on_the_host_is_gathered(group):
    whole, own = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE), numbers().cpu()
    assert torch.equal(result(whole, group.all_gather(own, whole, CUTS)), own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_reduction_in_place(group, dtype):
    whole = numbers(dtype)
    expected = 2 * whole.cpu()
    busy()
    whole.mul_(2)
    assert torch.equal(result(whole, group.reduce_scatter(whole, whole, CUTS, [0])), expected)


def test_a_reduction_in_fp32_of_16_bits(group):
    whole = numbers()
    expected = whole.float().cpu()
    target = torch.zeros(NUMEL, device=DEVICE)
    assert torch.equal(result(target, group.reduce_scatter(whole, target, CUTS, [0])), expected)


def test_a_reduction_to_the_host(group):
    whole = numbers()
    target = torch.zeros(NUMEL, dtype=torch.float32)
    transfer = group.reduce_scatter(whole, target, CUTS, [0])
    transfer.wait()
    assert torch.equal(target, whole.float().cpu())


@pytest.mark.skipif(not HAS_ACCELERATOR, reason="needs an accelerator")
def test_a_process_without_gradients_adds_zeros(group):
    target = torch.ones(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    assert not result(target, group.reduce_scatter(None, target, CUTS, [])).any()
