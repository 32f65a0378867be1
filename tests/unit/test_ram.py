"""Available memory: the system's, and what the control groups around a process have left; budgets that are open."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from patrickstar._hardware import ram
from patrickstar._hardware.ram import Ram, RamLimit, measure_ram

GIB = 1 << 30
TOTAL = 100 * GIB
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that describes this process's groups; the machine has 100 GiB, 90 GiB of them available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL, available=90 * GIB))
    monkeypatch.setattr(ram, "_PROC_SELF", tmp_path / "proc")
    (tmp_path / "proc").mkdir()

    def describe(groups: str, mounts: str, files: dict[str, object]) -> Ram:
        (tmp_path / "proc/cgroup").write_text(groups)
        (tmp_path / "proc/mountinfo").write_text(mounts.replace("/sys", str(tmp_path / "sys")))
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{content}\n")
        return measure_ram()

    return describe


def v2(folder: str, limit: object, current: int = 0, high: object = "max", **stat: int) -> dict[str, object]:
    lines = "\n".join(f"{name} {nbytes}" for name, nbytes in {"anon": current, **stat}.items())
    files = {"memory.max": limit, "memory.high": high, "memory.current": current, "memory.stat": lines}
    return {f"sys/fs/cgroup{folder}/{name}": content for name, content in files.items()}


def v1(folder: str, limit: int, usage: int = 0, **stat: int) -> dict[str, object]:
    lines = "\n".join(f"{name} {nbytes}" for name, nbytes in {"rss": usage, **stat}.items())
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": lines}
    return {f"sys/fs/cgroup/memory{folder}/{name}": content for name, content in files.items()}


MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def test_the_real_machine_has_memory():
    found = measure_ram()
    assert 0 < found.available_bytes <= psutil.virtual_memory().total
    assert 0 < found.default_bytes() < found.available_bytes


CACHING = v2("/job", 20 * GIB, 12 * GIB, inactive_file=3 * GIB, active_file=1 * GIB, slab_reclaimable=1 * GIB)
SLOWED_DOWN = v2("/job", 20 * GIB, GIB, high=8 * GIB)
AROUND = v2("/a", 30 * GIB, 25 * GIB) | v2("/a/b", 20 * GIB) | v2("/a/b/c", "max", 1 * GIB)
GROUPS = {
    # Group of the process, files; available bytes, and how many of them are left to others.
    "without groups the system's memory counts": ("/", {}, 90 * GIB, TOTAL // 10),
    "what a group uses, but not its page cache": ("/job", CACHING, 13 * GIB, 2 * GIB),
    "the groups around it count": ("/a/b/c", AROUND, 5 * GIB, 5 * GIB // 2),
    "the limit from which processes are slowed down counts": ("/job", SLOWED_DOWN, 7 * GIB, 8 * GIB // 10),
    "a group beyond its limit leaves nothing": ("/job", v2("/job", GIB, 2 * GIB), 0, 0),
}


@pytest.mark.parametrize(("group", "files", "available", "left"), GROUPS.values(), ids=GROUPS)
def test_groups_of_the_second_version(machine, group, files, available, left):
    found = machine(f"0::{group}\n", MOUNT_V2, files)
    assert (found.available_bytes, found.default_bytes()) == (available, available - left)


def test_the_first_version_of_groups_counts(machine):
    files = v1("", NO_LIMIT_V1, 60 * GIB) | v1("/k", 16 * GIB, 9 * GIB, inactive_file=7, total_inactive_file=2 * GIB)
    assert machine("5:cpu,cpuacct:/x\n4:memory:/k/pod\n0::/\n", MOUNT_V1, files).available_bytes == 9 * GIB


@pytest.mark.parametrize("path", ["/docker/1/inner", "/docker/1", "/elsewhere", "/../../other"])
def test_a_container_sees_its_own_group_at_the_mount(machine, path):
    mount = MOUNT_V1.replace("0:32 / /sys", "0:32 /docker/1 /sys")
    assert machine(f"4:memory:{path}\n", mount, v1("", 4 * GIB, GIB)).available_bytes == 3 * GIB


def test_without_groups_and_where_others_have_left_little_half_of_it_stays_free(monkeypatch):
    monkeypatch.setattr(ram, "_PROC_SELF", Path("/does/not/exist"))
    assert len(measure_ram().limits) == 1
    assert Ram((RamLimit(TOTAL, 12 * GIB),)).default_bytes() == 6 * GIB
    assert Ram((RamLimit(TOTAL, 30 * GIB),)).default_bytes(20 * GIB) == 5 * GIB
