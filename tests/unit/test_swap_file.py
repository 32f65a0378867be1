"""Test the swap file on a real disk, with real faults of the system."""

import errno
import fcntl
import mmap
import os
import random
import re
import resource
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._hardware.direct_io import BLOCK_BYTES, PAGE_BYTES
from patrickstar._hardware.vm_pool import round_up
from patrickstar._tiers import swap_file
from patrickstar._tiers.swap_file import SwapFile
from patrickstar.errors import BudgetError, DiskError

MIB = 1024**2
LABEL = "exp_avg[3]"


def page(content: bytes = b"", nbytes: int = PAGE_BYTES) -> memoryview:
    """Return page-aligned memory that starts with `content`."""
    memory = mmap.mmap(-1, round_up(nbytes))
    memory[: len(content)] = content
    return memoryview(memory)


@pytest.fixture
def file(tmp_path):
    try:
        made = SwapFile(tmp_path, MIB)
    except UserWarning as warning:
        pytest.skip(f"{tmp_path}: {warning}")
    yield made
    made.close()


def replace(file: SwapFile, path: str) -> None:
    """Replace the file behind the descriptor."""
    other = os.open(path, os.O_RDWR)
    os.dup2(other, file._fd)
    os.close(other)


MOUNTS = {"tmpfs": "size=3m", "ramfs": "mode=0700"}
IN_MOUNTS = f"""
import mmap, os, sys, warnings
from patrickstar._tiers.swap_file import DiskError, SwapFile

tmpfs, ramfs = sys.argv[1:]
file = SwapFile(tmpfs, {MIB})
for _ in range(2):
    try: file.reserve({4 * MIB}, "exp_avg[3]")
    except DiskError as error: print(error)
print(file.nbytes, os.fstat(file._fd).st_size, file.reserve({MIB}, "exp_avg[3]"), file.reserve({MIB}, "exp_avg[4]"))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    SwapFile(ramfs, 1)
    file = SwapFile(ramfs, {MIB})
memory = memoryview(mmap.mmap(-1, 8192))
file.write(file.reserve(5000, "exp_avg[3]"), memory, 5000, "exp_avg[3]")
file.read(0, memory, 5000, "exp_avg[3]")
print(len(said), file.direct, said[0].message)
"""


@pytest.fixture(scope="module")
def in_mounts(tmp_path_factory):
    """Run a process with other file systems; return their directories, and the lines that it prints."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in MOUNTS}
    mount = " && ".join(f'mount -t {kind} -o {MOUNTS[kind]} none "{folder}"' for kind, folder in folders.items())
    try:
        tried = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if tried.returncode:
        pytest.skip(f"can't mount {' and '.join(MOUNTS)} here: {tried.stderr.strip()}")
    python = [sys.executable, "-c", IN_MOUNTS, *map(str, folders.values())]
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folders, done.stdout.splitlines()


def test_file_is_unnamed_and_private(tmp_path):
    first, second = SwapFile(tmp_path, MIB), SwapFile(tmp_path, MIB)
    assert list(tmp_path.iterdir()) == [] and first.path != second.path
    for file in (first, second):
        assert re.fullmatch(r"patrickstar-.+\.chunks", file.path.name)
        status = os.fstat(file._fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0 and not os.get_inheritable(file._fd)
        file.write(file.reserve(99, LABEL), page(file.path.name.encode()), 99, LABEL)
    for file in (first, second):
        found = page()
        file.read(0, found, 99, LABEL)
        assert bytes(found).rstrip(b"\0").decode() == file.path.name
        file.close()


def test_extents_start_at_blocks_and_are_reserved(file):
    assert file.direct and fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT
    assert file.nbytes == os.fstat(file._fd).st_size == MIB <= os.fstat(file._fd).st_blocks * 512
    assert [file.reserve(nbytes, LABEL) for nbytes in (1, 4096, 4097, MIB)] == [0, 4096, 8192, 16384]
    status = os.fstat(file._fd)
    assert file.used_bytes == file.nbytes == status.st_size == 16384 + MIB <= status.st_blocks * 512


@settings(max_examples=draws(20), deadline=None)
@given(sizes=st.lists(st.integers(1, 5 * BLOCK_BYTES), min_size=1, max_size=8), seed=st.integers())
@example(sizes=[1, 4096, 4097], seed=0)
def test_written_bytes_are_read_back(tmp_path_factory, sizes, seed):
    file = SwapFile(tmp_path_factory.getbasetemp(), BLOCK_BYTES)
    written, order = {}, random.Random(seed)
    for nbytes in sizes:
        offset, content = file.reserve(nbytes, LABEL), order.randbytes(nbytes)
        file.write(offset, page(content), nbytes, LABEL)
        written[offset] = content
    for offset, content in order.sample(sorted(written.items()), len(written)):
        found = page()
        file.read(offset, found, len(content), LABEL)
        assert bytes(found[: len(content)]) == content
    assert file.read_bytes == file.written_bytes == sum(sizes)
    assert os.fstat(file._fd).st_size == max(BLOCK_BYTES, sum(-(-nbytes // 4096) * 4096 for nbytes in sizes))
    file.close()


def test_concurrent_reads_and_writes_until_close(file):
    locations = [file.reserve(64 * 1024, LABEL) for _ in range(4)]
    seen, failures = [], []

    def hammer(offset: int) -> None:
        memory = page(bytes([offset % 251]) * 65536, 65536)
        try:
            while True:
                file.write(offset, memory, 65536, LABEL)
                file.read(offset, memory, 65536, LABEL)
                assert bytes(memory) == bytes([offset % 251]) * 65536
                seen.append(offset)
        except DiskError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=hammer, args=(offset,)) for offset in locations]
    for thread in threads:
        thread.start()
    while len(set(seen)) < 4 and any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
    file.close()
    for thread in threads:
        thread.join()
    assert len(failures) == 4 and all("is closed" in failure for failure in failures)
    assert file.read_bytes >= 65536 * len(seen)


def test_closed_file_refuses_calls(file):
    file.reserve(9, LABEL)
    for _ in range(2):
        file.close()
    for act in (file.read, file.write):
        with pytest.raises(DiskError, match=rf"exp_avg\[3\].*{file.path.name} is closed"):
            act(0, page(), 9, LABEL)
    with pytest.raises(DiskError, match="is closed"):
        file.reserve(9, LABEL)


def test_collected_file_is_closed(tmp_path):
    file = SwapFile(tmp_path, 0)
    descriptor = file._fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_unusable_directory_is_named(tmp_path):
    """Nobody can create files in /sys, not even root, which ignores file modes."""
    (tmp_path / "taken").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    refused = {tmp_path / "none": "does not exist; create it", tmp_path / "taken": "is not a directory; give one"}
    denied = r"can't be written \(.+\); change its permissions"
    refused |= {Path("/sys"): denied} | ({tmp_path / "locked": denied} if os.getuid() else {})
    for directory, reason in refused.items():
        with pytest.raises(DiskError, match=rf"directory {directory} {reason}, or use another"):
            SwapFile(directory, MIB)


def test_file_never_exceeds_its_capacity(tmp_path):
    with pytest.raises(BudgetError, match="at least 4096 bytes"):
        SwapFile(tmp_path, 8193, capacity_bytes=8192)
    file = SwapFile(tmp_path, 0, capacity_bytes=10 * BLOCK_BYTES)
    file.reserve(9 * BLOCK_BYTES, "param32[0]")
    full = r"exp_avg\[3\].*of a capacity of 40960; raise that .* by at least 4096"
    with pytest.raises(BudgetError, match=full) as raised:
        file.reserve(BLOCK_BYTES + 1, LABEL)
    assert raised.value.short_bytes == 4096
    assert file.reserve(BLOCK_BYTES, LABEL) == 9 * BLOCK_BYTES
    assert os.fstat(file._fd).st_size == 10 * BLOCK_BYTES
    file.close()


def test_reservation_above_the_file_size_limit(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(DiskError, match=rf"the file needs {MIB + 4096} more bytes \(1.00 MiB\) .* File too large"):
            SwapFile(tmp_path, MIB + 1)
        SwapFile(tmp_path, MIB).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_detected_by_reserve(in_mounts):
    folders, said = in_mounts
    assert said[0] == said[1], "a reservation that fails leaves nothing behind"
    need = rf"exp_avg\[3\] needs {3 * MIB} more bytes \(3.00 MiB\) on the disk"
    assert re.match(rf"{need}, and {folders['tmpfs']} has {2 * MIB} bytes", said[0]), said
    assert "No space left on device; free space there, use another directory, or a smaller model" in said[0]
    assert said[2] == f"{MIB} {MIB} 0 {MIB}"


def test_disk_that_fills_later_loses_the_page(file):
    offset = file.reserve(2 * BLOCK_BYTES, LABEL)
    file.write(offset, page(b"old"), 5000, LABEL)
    replace(file, "/dev/full")
    pattern = rf"can't write 5000 bytes of exp_avg\[3\] at offset 0 of .*{file.path}: No space .*; free space there"
    with pytest.raises(DiskError, match=pattern):
        file.write(offset, page(b"new"), 5000, LABEL)
    with pytest.raises(DiskError, match="nothing was written there"):
        file.read(offset, page(), 5000, LABEL)


def test_disk_failure_names_the_chunk(file):
    offset = file.reserve(PAGE_BYTES, LABEL)
    file.write(offset, page(), PAGE_BYTES, LABEL)
    replace(file, "/proc/self/mem")
    for operation, act in (("read", file.read), ("write", file.write)):
        pattern = rf"can't {operation} 4194304 bytes of exp_avg\[3\] at offset 0 of .*{file.path}: Input/output error"
        with pytest.raises(DiskError, match=pattern):
            act(offset, page(), PAGE_BYTES, LABEL)


@pytest.mark.parametrize("left", [0, 4096, 5000])
def test_truncated_file_is_a_short_read(file, left):
    offset = file.reserve(PAGE_BYTES, LABEL)
    file.write(offset, page(), PAGE_BYTES, LABEL)
    os.ftruncate(file._fd, left)
    with pytest.raises(DiskError, match=rf"exp_avg\[3\].*short read, {left // 4096 * 4096} of 4194304 bytes"):
        file.read(offset, page(), PAGE_BYTES, LABEL)


@pytest.mark.parametrize("checksums", [True, False])
def test_changed_page_is_detected_with_checksums(tmp_path, checksums):
    file = SwapFile(tmp_path, MIB, checksums=checksums)
    _, offset = file.reserve(BLOCK_BYTES, "param32[0]"), file.reserve(5000, LABEL)
    file.write(offset, page(b"a" * 5000), 5000, LABEL)
    other = os.open(f"/proc/self/fd/{file._fd}", os.O_RDWR)
    os.pwrite(other, b"b", offset + 4999)
    os.close(other)
    found = page()
    if checksums:
        sums = "checksum [0-9a-f]{16} expected, [0-9a-f]{16} found"
        pattern = rf"5000 bytes of exp_avg\[3\] at offset 4096 of .*{file.path}: the page is damaged: {sums}"
        with pytest.raises(DiskError, match=pattern):
            file.read(offset, found, 5000, LABEL)
        with pytest.raises(DiskError, match="a page of 5000 bytes was written there"):
            file.read(offset, found, 4000, LABEL)
        with pytest.raises(DiskError, match="nothing was written there"):
            file.read(0, found, 4096, LABEL)
    else:
        file.read(offset, found, 5000, LABEL)
        assert bytes(found[:5000]) == b"a" * 4999 + b"b"
        file.read(0, found, 4096, LABEL)
    file.close()


def test_file_system_without_direct_io_warns_once(in_mounts):
    _, said = in_mounts
    assert said[3].startswith("1 False ") and "does not support direct I/O (O_DIRECT)" in said[3]


def test_refused_first_block_falls_back_to_the_page_cache(tmp_path, monkeypatch):
    swap_file._warn_buffered.cache_clear()
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="O_DIRECT"):
        patch.setattr(os, "pwritev", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
        file = SwapFile(tmp_path, MIB)
    assert not file.direct and not fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT
    found = page()
    file.write(file.reserve(5000, LABEL), page(b"a" * 5000), 5000, LABEL)
    file.read(0, found, 5000, LABEL)
    assert bytes(found[:5000]) == b"a" * 5000
    os.ftruncate(file._fd, 5000)
    with pytest.raises(DiskError, match="short read, 5000 of 8192"):
        file.read(0, page(), 5000, LABEL)
    file.close()
