"""A chunk: one storage for life, copies on two tiers, views with version counters of their own."""

import pytest
import torch

from patrickstar.layout.lists import ITEMSIZE
from patrickstar.memory.chunk import Chunk, Region, fill_poison

CPU = torch.device("cpu")


def chunk_of(values, dtype="float32"):
    chunk = Chunk("param16", 3, len(values), dtype, CPU)
    chunk.allocate_device()
    chunk.on_device(chunk.whole).copy_(torch.tensor(values))
    chunk.device_valid = True
    return chunk


def leave_and_come_back(chunk):
    """What an eviction and a fetch do to the bytes, on new memory."""
    chunk.allocate_host()
    chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))
    chunk.free_device(poison=True)
    in_the_way = torch.full((4096,), -1.0)
    chunk.allocate_device()
    chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))
    chunk.device_valid = True
    return in_the_way


def test_a_new_chunk_takes_no_memory():
    chunk = Chunk("exp_avg", 7, 100, "float32", CPU)
    assert (chunk.device_bytes, chunk.host_bytes) == (0, 0)
    assert chunk.nbytes == 400
    assert not chunk.device_valid and not chunk.host_valid
    assert repr(chunk) == "exp_avg[7]"


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_bytes_are_those_of_its_dtype_on_both_tiers(dtype):
    chunk = Chunk("param16", 0, 96, dtype, CPU)
    chunk.allocate_device()
    chunk.allocate_host()
    assert chunk.device_bytes == chunk.host_bytes == chunk.nbytes == 96 * getattr(torch, dtype).itemsize
    assert chunk.on_device(chunk.whole).dtype == chunk.on_host(chunk.whole).dtype == getattr(torch, dtype)
    assert chunk.host.untyped_storage().nbytes() == chunk.nbytes
    chunk.free_device(poison=False)
    chunk.free_host(poison=False)
    assert (chunk.device_bytes, chunk.host_bytes) == (0, 0)


def test_a_chunk_of_no_elements_comes_and_goes():
    chunk = chunk_of([])
    leave_and_come_back(chunk)
    assert chunk.current(chunk.whole).shape == (0,)
    chunk.free_host(poison=True)


def test_views_see_the_bytes_that_came_back():
    chunk = chunk_of([float(i) for i in range(8)])
    view = chunk.on_device(Region(2, (2, 3), (3, 1)))
    derived = view.t()[1:]
    assert derived.tolist() == [[3.0, 6.0], [4.0, 7.0]]
    storage = chunk.storage
    leave_and_come_back(chunk)
    assert chunk.storage is storage
    assert view.untyped_storage()._cdata == storage._cdata
    assert derived.tolist() == [[3.0, 6.0], [4.0, 7.0]]


def test_moving_bytes_is_no_modification_that_autograd_knows_of():
    chunk = chunk_of([1.0, 2.0, 3.0, 4.0])
    weight = chunk.on_device(chunk.whole)
    version = weight._version
    factor = torch.ones(4, requires_grad=True)
    loss = (weight * factor).sum()
    leave_and_come_back(chunk)
    assert weight._version == version
    loss.backward()
    assert factor.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_every_view_counts_its_own_versions():
    chunk = chunk_of([1.0, 2.0])
    one, other = chunk.on_device(chunk.whole), chunk.on_device(chunk.whole)
    before = other._version
    one.mul_(2)
    assert other.tolist() == [2.0, 4.0]
    assert other._version == before


def test_a_region_has_an_offset_a_shape_and_strides():
    chunk = chunk_of([float(i) for i in range(12)])
    chunk.allocate_host()
    chunk.on_host(chunk.whole).copy_(chunk.on_device(chunk.whole))
    column_major = Region(4, (2, 3), (1, 2))
    for view in (chunk.on_device(column_major), chunk.on_host(column_major)):
        assert view.tolist() == [[4.0, 6.0, 8.0], [5.0, 7.0, 9.0]]
        assert view.stride() == (1, 2)
        assert view.storage_offset() == 4


def test_current_is_the_copy_that_holds_the_bytes_the_devices_if_both_do():
    chunk = chunk_of([1.0])
    chunk.allocate_host()
    chunk.on_host(chunk.whole).fill_(2.0)
    assert chunk.current(chunk.whole).item() == 1.0
    chunk.host_valid = True
    assert chunk.current(chunk.whole).item() == 1.0
    chunk.free_device(poison=False)
    assert chunk.current(chunk.whole).item() == 2.0
    chunk.free_host(poison=False)
    with pytest.raises(AssertionError, match=r"param16\[3\] holds nothing"):
        chunk.current(chunk.whole)
    with pytest.raises(AssertionError, match=r"param16\[3\] has no host copy"):
        chunk.on_host(chunk.whole)


def test_freeing_makes_a_copy_invalid():
    chunk = chunk_of([1.0])
    chunk.allocate_host()
    chunk.host_valid = True
    chunk.free_device(poison=False)
    assert not chunk.device_valid and chunk.host_valid
    chunk.free_host(poison=False)
    assert not chunk.host_valid


def test_poison_reaches_whoever_kept_the_host_copy():
    chunk = chunk_of([1.0, 2.0])
    chunk.allocate_host()
    kept = chunk.on_host(chunk.whole)
    chunk.free_host(poison=True)
    assert kept.isnan().all()


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
