"""NCCL collectives with one process, the most that one GPU allows: streams, dtypes, in-place results."""

import pytest
import torch
import torch.distributed as dist
from cuda_cases import DEVICE, HAS_ACCELERATOR, ON_GPU, marks

from patrickstar._distributed.collectives import Levels
from patrickstar._distributed.gloo_collectives import GlooCollectives
from patrickstar._distributed.process_group import World
from patrickstar._distributed.stream_collectives import StreamCollectives
from patrickstar._tiers.hardware import Hardware

pytestmark = marks

NUMEL = 1 << 16
CUTS = (0, NUMEL)


@pytest.fixture
def only(monkeypatch):
    """Provide the collectives of one process, and its group."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    accelerator = Hardware(DEVICE).accelerator
    device = DEVICE if accelerator is None else accelerator.device
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = World(device)
    collectives = GlooCollectives(world) if accelerator is None else StreamCollectives(world, accelerator)
    yield collectives, world.everyone
    collectives.close()
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


@pytest.mark.parametrize("own_on_host", [False, True])
def test_a_gather_waits_for_computation_and_returns_all_shards(only, own_on_host):
    collectives, group = only
    whole, values = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE), numbers()
    own = values.cpu() if own_on_host else values
    busy()
    assert torch.equal(result(whole, collectives.all_gather(group, own, whole, CUTS)), values.cpu())
    if own_on_host:
        whole.zero_()
        assert torch.equal(result(whole, collectives.gather_to(group, own, whole, CUTS, [0])), own)
    else:
        on_host, again = torch.zeros(NUMEL, dtype=torch.bfloat16), torch.zeros_like(whole)
        collectives.all_gather(group, own, on_host, CUTS).wait()
        assert torch.equal(on_host, own.cpu())
        gathered = collectives.all_gather(group, on_host, again, CUTS, in_order=True)
        assert torch.equal(result(again, gathered), own.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_reduction_in_two_levels_and_one_in_place(only, dtype):
    collectives, group = only
    whole, target = numbers(dtype), torch.zeros(NUMEL, dtype=dtype, device=DEVICE)
    expected = whole.cpu()
    transfer = collectives.hierarchical_reduce_scatter(Levels(group, group), whole, target, CUTS, [0], [0])
    assert torch.equal(result(target, transfer), expected)
    whole = numbers(dtype)
    expected = 2 * whole.cpu()
    busy()
    whole.mul_(2)
    assert torch.equal(result(whole, collectives.reduce_scatter(group, whole, whole, CUTS, [0])), expected)


@pytest.mark.parametrize("device", [DEVICE, torch.device("cpu")], ids=["on the device", "on the host"])
def test_a_reduction_in_fp32_of_16_bits(only, device):
    collectives, group = only
    whole, target = numbers(), torch.zeros(NUMEL, device=device)
    transfer = collectives.reduce_scatter(group, whole, target, CUTS, [0])
    if device.type == "cpu":
        transfer.wait()
    assert torch.equal(result(target, transfer), whole.float().cpu())


@pytest.mark.skipif(not HAS_ACCELERATOR, reason="needs an accelerator")
def test_a_process_without_gradients_adds_zeros(only):
    collectives, group = only
    target = torch.ones(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    assert not result(target, collectives.reduce_scatter(group, None, target, CUTS, [])).any()
