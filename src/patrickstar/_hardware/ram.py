"""RAM of this machine that training may use: what the system has free, control groups, and the default's reserve."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from patrickstar._perf_model.margins import ram_budget

_PROC_SELF = Path("/proc/self")
_RECLAIMABLE = "inactive_file", "active_file", "slab_reclaimable"
"""Entries of `memory.stat` that the system frees when a group needs memory. Mapped files of others and page-locked
memory are in none of them."""

# [Note: default budgets]
# By default budgets take no more of the RAM than `Ram.default_bytes`. The memory that can be had is the least of what
# the system calls available (free memory and page cache, without what is page-locked), and of what each control group
# around this process has left: its limit, less what it uses, but for the page cache in it. A tenth of the machine's
# memory, or of the group's limit, stays available: the code of libraries and the page cache count as available,
# although programs slow down without them; what libraries, Python, data loaders and other programs take later is in no
# budget; and guards against a full memory end the largest process. Where others have left less than two tenths, half
# of the rest stays. `_perf_model/margins.py` has this rule, which plans of machines follow, too.
#
# Budgets are limits: beside a GPU the memory that is taken at once, page-locked, is that of the model data, and of
# speculative updates as they ask for it (see [Note: spare blocks]).


@dataclass(frozen=True)
class RamLimit:
    """A limit of this process's memory: the machine's, or a control group's."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Ram:
    """Memory of this machine when it was measured. See [Note: default budgets]."""

    limits: tuple[RamLimit, ...]

    @property
    def available_bytes(self) -> int:
        """Bytes that can be taken before the system ends a process."""
        return max(0, min(limit.available_bytes for limit in self.limits))

    def default_bytes(self, given_bytes: int = 0) -> int:
        """Return the bytes that budgets take by default beside budgets of `given_bytes`; 0 if these take all."""

        def left(limit: RamLimit) -> int:
            return ram_budget(max(0, limit.available_bytes - given_bytes), limit.total_bytes)

        return min(left(limit) for limit in self.limits)


def measure_ram() -> Ram:
    """Measure the memory that this process can have now."""
    memory = psutil.virtual_memory()
    return Ram((RamLimit(int(memory.total), int(memory.available)), *_group_limits()))


def _group_limits() -> Iterator[RamLimit]:
    """Yield the limits of the control groups that this process is in, and of those around them."""
    try:
        groups = (_PROC_SELF / "cgroup").read_text().splitlines()
        mounts = (_PROC_SELF / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups)}
    for line in mounts:
        # Id, parent, device, root, mount point, options, ... - type, source, options of the file system.
        mount, _, system = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind, *_, options = system.split()
        if kind == "cgroup2":
            path, read = paths.get(""), _read_group
        elif kind == "cgroup" and "memory" in options.split(","):
            path, read = next((paths[each] for each in paths if "memory" in each.split(",")), None), _read_group_v1
        else:
            continue
        for folder in _folders(Path(point), root, path):
            try:
                limit = read(folder)
            except (OSError, ValueError, KeyError):  # the root has no limit, and a container may hide these files
                continue
            if limit is not None:
                yield limit


def _folders(point: Path, root: str, path: str | None) -> Iterator[Path]:
    """Yield the folders of a group and of those around it, as far as they are mounted at `point`, where `root` is."""
    inside = PurePosixPath(path or root)
    # In a container the path can be one of the host's, which is not mounted: then the mount is the container's group.
    group = inside.relative_to(root) if inside.is_relative_to(root) and ".." not in inside.parts else PurePosixPath()
    yield from (point / folder for folder in (group, *group.parents))


def _stat(folder: Path, prefix: str = "") -> int:
    """Return the reclaimable bytes of a group with all groups in it."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(f"{prefix}{name}", 0)) for name in _RECLAIMABLE)


def _read_group(folder: Path) -> RamLimit | None:
    # Above `memory.high` processes are slowed down until they stand still.
    limits = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
    total_bytes = min((int(limit) for limit in limits if limit != "max"), default=None)
    if total_bytes is None:
        return None
    return RamLimit(total_bytes, total_bytes - int((folder / "memory.current").read_text()) + _stat(folder))


def _read_group_v1(folder: Path) -> RamLimit | None:
    total_bytes = int((folder / "memory.limit_in_bytes").read_text())
    if total_bytes >= 1 << 62:  # no limit: the largest multiple of a page
        return None
    used_bytes = int((folder / "memory.usage_in_bytes").read_text())
    return RamLimit(total_bytes, total_bytes - used_bytes + _stat(folder, "total_"))
