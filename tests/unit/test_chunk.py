"""Chunk: permanent device storage, copies on the tiers, views with separate version counters."""

import gc
from types import SimpleNamespace

import pytest
import torch

from patrickstar._hardware.transfer import Deferred
from patrickstar._hardware.vm_pool import PagePool, can_move_pages, round_up
from patrickstar._layout.schema import ITEMSIZE
from patrickstar._tiers.chunk import Chunk, Copy, DiskCopy, HostCopy, Region, fill_poison
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_tier import HostTier

CPU = torch.device("cpu")


@pytest.fixture(params=["resized", "remapped"])
def page_pool(request):
    """Source of device memory: PyTorch's allocator (None), or a page pool."""
    if request.param == "resized":
        return None
    if not can_move_pages():
        pytest.skip("this system cannot remap pages")
    return PagePool()


@pytest.fixture
def host():
    return HostTier(1 << 16, 1 << 16, Hardware(CPU).host_arena, poison=True)


def chunk_of(values, page_pool=None, dtype="float32"):
    chunk = Chunk("param16", 3, len(values), dtype, CPU, page_pool)
    chunk.allocate_device()
    chunk.on_device(chunk.whole).copy_(torch.tensor(values))
    chunk.device.valid = True
    return chunk


def evict_and_fetch(chunk, host, page_pool):
    """Evict and fetch a chunk, while another chunk takes over its device memory in between."""
    host.allocate(chunk).copy_(chunk.on_device(chunk.whole))
    chunk.free_device(poison=True)
    intruder = Chunk("param16", 4, max(chunk.numel, 1024), "float32", CPU, page_pool)
    intruder.allocate_device()
    intruder.on_device(intruder.whole).fill_(-1.0)
    chunk.allocate_device()
    chunk.on_device(chunk.whole).copy_(chunk.on_host(chunk.whole))
    chunk.device.valid = True
    assert (intruder.on_device(intruder.whole) == -1.0).all()


def real_device_bytes(chunk, page_pool):
    """Return the real device memory of all chunks of a pool, or of one chunk without a pool."""
    return chunk.storage.nbytes() if page_pool is None else page_pool.mapped_bytes - page_pool.parked_bytes


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_sizes_follow_the_dtype_on_both_tiers(dtype, page_pool, host):
    chunk = Chunk("param16", 0, 96, dtype, CPU, page_pool)
    chunk.allocate_device()
    host.allocate(chunk)
    assert chunk.device_bytes == chunk.host_bytes == chunk.nbytes == 96 * getattr(torch, dtype).itemsize
    assert chunk.on_device(chunk.whole).dtype == chunk.on_host(chunk.whole).dtype == getattr(torch, dtype)
    assert chunk.host.memory.nbytes == chunk.host.block.nbytes == chunk.nbytes
    assert real_device_bytes(chunk, page_pool) == (chunk.nbytes if page_pool is None else round_up(chunk.nbytes))
    chunk.free_device(poison=False)
    host.free(chunk)
    assert (chunk.device_bytes, chunk.host_bytes) == (0, 0)
    assert real_device_bytes(chunk, page_pool) == 0


def test_empty_chunk_is_evicted_and_fetched(page_pool, host):
    chunk = chunk_of([], page_pool)
    evict_and_fetch(chunk, host, page_pool)
    assert chunk.current(chunk.whole).shape == (0,)
    host.free(chunk)
    chunk.free_device(poison=True)
    chunk.memory.close()


def test_views_see_the_bytes_after_a_fetch_which_changes_no_version_counter_of_autograd(page_pool, host):
    chunk = chunk_of([float(i) for i in range(8)], page_pool)
    view = chunk.on_device(Region(2, (2, 3), (3, 1)))
    derived, storage, version = view.t()[1:], chunk.storage, view._version
    assert derived.tolist() == [[3.0, 6.0], [4.0, 7.0]]
    factor = torch.ones(2, 3, requires_grad=True)
    loss = (view * factor).sum()
    evict_and_fetch(chunk, host, page_pool)
    assert chunk.storage is storage and view._version == version
    assert view.untyped_storage()._cdata == storage._cdata
    assert derived.tolist() == [[3.0, 6.0], [4.0, 7.0]]
    loss.backward()
    assert factor.grad.tolist() == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]


def test_every_view_has_its_own_version_counter(page_pool):
    chunk = chunk_of([1.0, 2.0], page_pool)
    first, second = chunk.on_device(chunk.whole), chunk.on_device(chunk.whole)
    before = second._version
    first.mul_(2)
    assert second.tolist() == [2.0, 4.0]
    assert second._version == before


def test_a_region_has_an_offset_a_shape_and_strides(page_pool, host):
    host.allocate(chunk_of([0.0], page_pool))  # shifts the block of the next chunk
    chunk = chunk_of([float(i) for i in range(12)], page_pool)
    host.allocate(chunk).copy_(chunk.on_device(chunk.whole))
    column_major = Region(4, (2, 3), (1, 2))
    for view in (chunk.on_device(column_major), chunk.on_host(column_major)):
        assert view.tolist() == [[4.0, 6.0, 8.0], [5.0, 7.0, 9.0]]
        assert view.stride() == (1, 2)
    assert chunk.on_device(column_major).storage_offset() == 4
    assert chunk.on_host(column_major).storage_offset() == chunk.host.block.start // 4 + 4 > 4


def test_current_is_a_valid_copy_preferably_the_device_copy(page_pool, host):
    chunk = chunk_of([1.0], page_pool)
    host.allocate(chunk).fill_(2.0)
    assert chunk.current(chunk.whole).item() == 1.0
    assert chunk.read_storage is chunk.storage
    chunk.host.valid = True
    assert chunk.current(chunk.whole).item() == 1.0
    chunk.free_device(poison=False)
    assert chunk.current(chunk.whole).item() == 2.0
    assert chunk.read_storage.data_ptr() == host.arenas[0].memory.data_ptr()
    assert chunk.in_memory and not chunk.device.valid
    host.free(chunk)
    chunk.disk.valid = True
    assert not chunk.in_memory and not chunk.host.valid
    with pytest.raises(AssertionError, match=r"param16\[3\] is not in memory"):
        chunk.current(chunk.whole)
    with pytest.raises(AssertionError, match=r"param16\[3\] has no host copy"):
        chunk.on_host(chunk.whole)


@pytest.mark.parametrize("view", [lambda chunk: chunk.on_device(chunk.whole), Chunk.device_bytes_view])
def test_device_views_need_allocated_device_memory(view, page_pool, host):
    """On a GPU PyTorch would silently allocate it outside of the budget."""
    chunk = Chunk("param16", 3, 4, "float32", CPU, page_pool)
    message = r"param16\[3\] has no device memory"
    with pytest.raises(AssertionError, match=message):
        view(chunk)
    chunk.allocate_device()
    assert view(chunk).numel() > 0
    host.allocate(chunk)
    chunk.free_device(poison=True)
    with pytest.raises(AssertionError, match=message):
        view(chunk)
    assert real_device_bytes(chunk, page_pool) == 0


def test_poison_fills_device_memory_before_it_is_freed():
    """The next owner of the pages finds NaN instead of old weights."""
    if not can_move_pages():
        pytest.skip("this system cannot remap pages")
    page_pool = PagePool()
    chunk = chunk_of([1.0, 2.0], page_pool)
    chunk.free_device(poison=True)
    other = Chunk("param16", 4, 2, "float32", CPU, page_pool)
    other.allocate_device()
    assert other.on_device(other.whole).isnan().all()


def test_a_view_may_outlive_its_chunk(page_pool):
    """Its content is undefined, but reads and writes must not reach the memory of other chunks."""
    chunk = chunk_of([1.0, 2.0], page_pool)
    view = chunk.on_device(chunk.whole)
    address = view.data_ptr()
    del chunk
    gc.collect()
    others = [chunk_of([5.0, 5.0], page_pool) for _ in range(8)]
    assert view.data_ptr() == address
    view.fill_(7.0)
    assert view.tolist() == [7.0, 7.0]
    assert all(other.on_device(other.whole).tolist() == [5.0, 5.0] for other in others)


@pytest.mark.parametrize("dtype", sorted({*ITEMSIZE, "int64", "int32", "int16", "int8", "uint8", "bool"}))
def test_poison_is_nan_or_the_largest_integer_and_booleans_stay(dtype):
    buffer = torch.tensor([1, 0, 1], dtype=getattr(torch, dtype))
    fill_poison(buffer)
    if buffer.is_floating_point():
        assert buffer.isnan().all()
    else:
        assert buffer.tolist() == ([True, False, True] if dtype == "bool" else 3 * [torch.iinfo(buffer.dtype).max])


# Copies: who waits for what uses their memory


@pytest.fixture
def log() -> list[str]:
    return []


def recorded(label: str, log: list[str], done: bool = False) -> SimpleNamespace:
    """Return a transfer that records when it is waited for."""
    return SimpleNamespace(label=label, done=done, wait=lambda: log.append(label))


def in_use(log: list[str]) -> Copy:
    """Return a copy that everything uses at once."""
    copy = HostCopy()
    copy.writer, copy.reader = recorded("writer", log), recorded("reader", log)

    def end_update() -> None:
        copy.update = None
        log.append("update")

    copy.update, copy.save = Deferred("update", end_update), recorded("save", log)
    return copy


def test_the_host_reads_a_copy_once_it_has_been_written_and_writes_it_once_no_transfer_reads_it(log):
    copy = in_use(log)
    for _ in range(2):  # each transfer is waited for once
        copy.settle()
        assert log == ["writer"] and copy.writer is None and copy.reader is not None
    copy.settle(write=True)
    assert log == ["writer", "reader"] and copy.update is not None, "updates are ended by who needs their results"


def test_memory_is_freed_or_moved_once_nothing_uses_it(log):
    copy = in_use(log)
    for _ in range(2):
        copy.settle(move=True)
        assert log == ["update", "writer", "reader", "save"]


def test_an_update_that_ends_may_start_a_copy_which_is_waited_for_too(log):
    copy = in_use(log)
    copy.writer = None

    def end_update() -> None:
        copy.update, copy.reader = None, recorded("renewal", log)

    copy.update = Deferred("update", end_update)
    copy.settle(move=True)
    assert log == ["renewal", "save"]


def test_who_settles_a_copy_says_how_it_waits(log):
    copy, waited = in_use(log), []
    copy.settle(write=True, wait=lambda transfer: waited.append(transfer.label))
    assert waited == ["writer", "reader"] and not log


def test_pages_are_read_after_writes_and_written_after_reads(log):
    copy = DiskCopy()
    copy.reads = [recorded("read", log)]
    copy.writes = {0: recorded("write", log), 512: recorded("done", log, done=True)}
    assert copy.has_writes and copy.writes_page(0)
    assert not copy.writes_page(512) and not copy.writes_page(1024)
    copy.settle()
    assert log == ["write", "done"]
    copy.settle(write=True)
    assert log == ["write", "done", "read", "write", "done"]


def test_whoever_frees_a_chunk_or_needs_its_content_ends_all_that_uses_it():
    chunk, ended = chunk_of([1.0]), []

    def use() -> None:
        ended.clear()
        for name, copy in (("device", chunk.device), ("host", chunk.host)):
            copy.update, copy.save = (recorded(f"{use} on the {name}", ended) for use in ("update", "save"))
        chunk.deferred = recorded("deferred update", ended)

    use()
    chunk.host.settle(move=True)
    assert ended == ["update on the host", "save on the host"]
    use()
    chunk.complete_update()
    assert ended == ["update on the device", "update on the host", "deferred update"]
    use()
    chunk.finish_update()
    assert ended == ["update on the device", "update on the host"]
