"""A chunk: one storage for life, copies on the tiers, views with version counters of their own."""

import gc

import pytest
import torch

from patrickstar._layout.schema import ITEMSIZE
from patrickstar._memory.chunk import Chunk, Region, fill_poison
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.host_tier import HostTier
from patrickstar._memory.vm_pool import PagePool, can_move_pages, round_up

CPU = torch.device("cpu")


@pytest.fixture(params=["resized", "moved"])
def bank(request):
    """What device memory comes from: PyTorch's allocator, or pages that move."""
    if request.param == "resized":
        return None
    if not can_move_pages():
        pytest.skip("this system moves no pages")
    return PagePool()


@pytest.fixture
def host():
    return HostTier(1 << 16, 1 << 16, Hardware(CPU).host_arena, poison=True)


def chunk_of(values, bank=None, dtype="float32"):
    chunk = Chunk("param16", 3, len(values), dtype, CPU, bank)
    chunk.allocate_device()
    chunk.on_device(chunk.whole).copy_(torch.tensor(values))
    chunk.device_valid = True
    return chunk


def on_both(values, host, bank=None):
    chunk = chunk_of(values, bank)
    host.allocate(chunk).copy_(chunk.on_device(chunk.whole))
    chunk.host_valid = True
    return chunk


def leave_and_come_back(chunk, host, bank):
    """What an eviction and a fetch do to the bytes, on memory that another has used and now has in its stead."""
    host.allocate(chunk).copy_(chunk.on_device(chunk.whole))
    chunk.free_device(poison=True)
    in_the_way = Chunk("param16", 4, max(chunk.numel, 1024), "float32", CPU, bank)
    in_the_way.allocate_device()
    in_the_way.on_device(in_the_way.whole).fill_(-1.0)
    chunk.allocate_device()
    chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))
    chunk.device_valid = True
    assert (in_the_way.on_device(in_the_way.whole) == -1.0).all()


def really_taken(chunk, bank):
    """Bytes of device memory behind the chunks of a bank, or behind a chunk without one."""
    return chunk.storage.nbytes() if bank is None else bank.mapped_bytes - bank.parked_bytes


def test_a_new_chunk_takes_no_memory(bank):
    chunk = Chunk("exp_avg", 7, 100, "float32", CPU, bank)
    assert (chunk.device_bytes, chunk.host_bytes) == (0, 0)
    assert really_taken(chunk, bank) == 0
    assert chunk.nbytes == 400
    assert not chunk.device_valid and not chunk.host_valid and not chunk.disk_valid
    assert not chunk.in_memory
    assert repr(chunk) == "exp_avg[7]"


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_bytes_are_those_of_its_dtype_on_both_tiers(dtype, bank, host):
    chunk = Chunk("param16", 0, 96, dtype, CPU, bank)
    chunk.allocate_device()
    host.allocate(chunk)
    assert chunk.device_bytes == chunk.host_bytes == chunk.nbytes == 96 * getattr(torch, dtype).itemsize
    assert chunk.on_device(chunk.whole).dtype == chunk.on_host(chunk.whole).dtype == getattr(torch, dtype)
    assert chunk.host.nbytes == chunk.host_block.nbytes == chunk.nbytes
    assert really_taken(chunk, bank) == (chunk.nbytes if bank is None else round_up(chunk.nbytes))
    chunk.free_device(poison=False)
    host.free(chunk)
    assert (chunk.device_bytes, chunk.host_bytes) == (0, 0)
    assert really_taken(chunk, bank) == 0


def test_a_chunk_of_no_elements_comes_and_goes(bank, host):
    chunk = chunk_of([], bank)
    leave_and_come_back(chunk, host, bank)
    assert chunk.current(chunk.whole).shape == (0,)
    host.free(chunk)
    chunk.free_device(poison=True)
    chunk.memory.close()


def test_views_see_the_bytes_that_came_back(bank, host):
    chunk = chunk_of([float(i) for i in range(8)], bank)
    view = chunk.on_device(Region(2, (2, 3), (3, 1)))
    derived = view.t()[1:]
    assert derived.tolist() == [[3.0, 6.0], [4.0, 7.0]]
    storage = chunk.storage
    leave_and_come_back(chunk, host, bank)
    assert chunk.storage is storage
    assert view.untyped_storage()._cdata == storage._cdata
    assert derived.tolist() == [[3.0, 6.0], [4.0, 7.0]]


def test_moving_bytes_is_no_modification_that_autograd_knows_of(bank, host):
    chunk = chunk_of([1.0, 2.0, 3.0, 4.0], bank)
    weight = chunk.on_device(chunk.whole)
    version = weight._version
    factor = torch.ones(4, requires_grad=True)
    loss = (weight * factor).sum()
    leave_and_come_back(chunk, host, bank)
    assert weight._version == version
    loss.backward()
    assert factor.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_every_view_counts_its_own_versions(bank):
    chunk = chunk_of([1.0, 2.0], bank)
    one, other = chunk.on_device(chunk.whole), chunk.on_device(chunk.whole)
    before = other._version
    one.mul_(2)
    assert other.tolist() == [2.0, 4.0]
    assert other._version == before


def test_a_region_has_an_offset_a_shape_and_strides(bank, host):
    host.allocate(chunk_of([0.0], bank))  # places of others come before
    chunk = on_both([float(i) for i in range(12)], host, bank)
    column_major = Region(4, (2, 3), (1, 2))
    for view in (chunk.on_device(column_major), chunk.on_host(column_major)):
        assert view.tolist() == [[4.0, 6.0, 8.0], [5.0, 7.0, 9.0]]
        assert view.stride() == (1, 2)
    assert chunk.on_device(column_major).storage_offset() == 4
    assert chunk.on_host(column_major).storage_offset() == chunk.place.start // 4 + 4 > 4


def test_current_is_the_copy_that_holds_the_bytes_the_devices_if_both_do(bank, host):
    chunk = chunk_of([1.0], bank)
    host.allocate(chunk).fill_(2.0)
    assert chunk.current(chunk.whole).item() == 1.0
    assert chunk.read_storage is chunk.storage
    chunk.host_valid = True
    assert chunk.current(chunk.whole).item() == 1.0
    chunk.free_device(poison=False)
    assert chunk.current(chunk.whole).item() == 2.0
    assert chunk.read_storage.data_ptr() == host.arenas[0].memory.data_ptr()
    host.free(chunk)
    with pytest.raises(AssertionError, match=r"param16\[3\] is not in memory"):
        chunk.current(chunk.whole)
    with pytest.raises(AssertionError, match=r"param16\[3\] has no host copy"):
        chunk.on_host(chunk.whole)


@pytest.mark.parametrize("view", [lambda chunk: chunk.on_device(chunk.whole), Chunk.device_bytes_view])
def test_device_memory_that_a_chunk_does_not_have_is_not_looked_at(view, bank, host):
    """On a GPU PyTorch would silently allocate it, behind the budget's back."""
    chunk = Chunk("param16", 3, 4, "float32", CPU, bank)
    message = r"param16\[3\] has no device memory"
    with pytest.raises(AssertionError, match=message):
        view(chunk)
    chunk.allocate_device()
    assert view(chunk).numel() > 0
    host.allocate(chunk)
    chunk.free_device(poison=True)
    with pytest.raises(AssertionError, match=message):
        view(chunk)
    assert really_taken(chunk, bank) == 0


def test_what_is_on_disk_alone_is_not_in_memory(bank):
    chunk = chunk_of([1.0], bank)
    chunk.disk_valid = True
    assert chunk.in_memory
    chunk.free_device(poison=True)
    assert chunk.disk_valid and not chunk.in_memory
    with pytest.raises(AssertionError, match="not in memory"):
        chunk.current(chunk.whole)


def test_freeing_makes_a_copy_invalid(bank, host):
    chunk = on_both([1.0], host, bank)
    chunk.free_device(poison=False)
    assert not chunk.device_valid and chunk.host_valid
    host.free(chunk)
    assert not chunk.host_valid


def test_poison_reaches_whoever_kept_the_host_copy(host):
    chunk = on_both([1.0, 2.0], host)
    kept = chunk.on_host(chunk.whole)
    host.free(chunk)
    assert kept.isnan().all()


def test_poison_reaches_the_device_before_its_memory_goes():
    """Whoever gets the pages next finds NaN, and no old weights."""
    if not can_move_pages():
        pytest.skip("this system moves no pages")
    bank = PagePool()
    chunk = chunk_of([1.0, 2.0], bank)
    chunk.free_device(poison=True)
    other = Chunk("param16", 4, 2, "float32", CPU, bank)
    other.allocate_device()
    assert other.on_device(other.whole).isnan().all()


def test_a_view_that_outlives_its_chunk_is_memory_still(bank):
    """Its content is nobody's, but neither reading nor writing it may hit what others were given."""
    chunk = chunk_of([1.0, 2.0], bank)
    view = chunk.on_device(chunk.whole)
    address = view.data_ptr()
    del chunk
    gc.collect()
    others = [chunk_of([5.0, 5.0], bank) for _ in range(8)]
    assert view.data_ptr() == address
    view.fill_(7.0)
    assert view.tolist() == [7.0, 7.0]
    assert all(other.on_device(other.whole).tolist() == [5.0, 5.0] for other in others)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_poison_of_real_numbers_is_nan(dtype):
    buffer = torch.zeros(3, dtype=getattr(torch, dtype))
    fill_poison(buffer)
    assert buffer.isnan().all()


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8"])
def test_poison_of_integers_is_the_largest(dtype):
    buffer = torch.zeros(3, dtype=getattr(torch, dtype))
    fill_poison(buffer)
    assert (buffer == torch.iinfo(buffer.dtype).max).all()


def test_a_truth_value_can_not_be_poisoned():
    buffer = torch.tensor([True, False])
    fill_poison(buffer)
    assert buffer.tolist() == [True, False]
