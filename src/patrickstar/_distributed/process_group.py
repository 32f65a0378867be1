"""Processes of a training run and groups of them: agreement on options, and detection of processes that ended."""

import inspect
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from patrickstar._distributed.deadlock_watch import DeadlockWatch, own_call
from patrickstar._distributed.group_creation import connect, store_barrier
from patrickstar._distributed.rendezvous import Launch, join_group
from patrickstar._distributed.roster import group_prefix
from patrickstar._distributed.single_process import SINGLE_PROCESS, SingleProcess
from patrickstar._distributed.torch_errors import first_line
from patrickstar.errors import ConfigError, PeerError

_Error = TypeVar("_Error", bound=Exception)
_Value = TypeVar("_Value")

Partition = tuple[tuple[int, ...], ...]
"""Ranks of groups that together contain every process once."""

ALIVE_TIMEOUT_S = 10.0
"""Seconds for processes of other machines to report that they are alive, after a collective failed."""
POLL_S = 0.1
COLLECTIVE_POLL_S = 50e-6
"""Seconds between checks of a pending all-gather."""
_GLOO = "gloo/transport"
"""Part of the errors of gloo's collectives when another process has ended."""


_worlds: "WeakKeyDictionary[dist.ProcessGroup, World]" = WeakKeyDictionary()
"""One World per process group of torch: its coordination steps are one sequence for all engines."""


class RankGroup:
    """Processes of the world that share chunks, or that coordinate.

    Attributes:
        ranks: Their ranks in the world; members are numbered in this order.
        rank: Number of this process.
        control: Process group for messages on the host.
        data: Process group for chunks, of the compute device's backend.
    """

    def __init__(
        self, world: "World", ranks: Sequence[int], control: dist.ProcessGroup | None, data: dist.ProcessGroup | None
    ) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self.control, self.data = control, data

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather flat tensors of one size from all members, in their order; raise PeerError if a process has ended.

        The wait is in Python, so that Ctrl-C can interrupt it.
        """
        if self.size == 1:
            return own.view(1, -1)
        gathered = torch.empty(self.size * own.numel(), dtype=own.dtype, device="cpu")
        with explain_peer_failure(self.world):
            work = gather_into(gathered, own, self.control, async_op=True)
            with self.world.watch.waiting() as wait:
                while not work.is_completed():
                    time.sleep(COLLECTIVE_POLL_S)
                    wait.check()
            work.wait()
        return gathered.view(self.size, -1)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Broadcast a tensor on the host from a member, given by its number."""
        if self.size > 1:
            with explain_peer_failure(self.world):
                dist.broadcast(tensor, group_src=rank, group=self.control)


class World:
    """One process of a torch.distributed process group."""

    def __init__(self, device: torch.device) -> None:
        """Create groups for control messages and for data; all processes must call this."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.closed = False
        self.aborted = False
        """True once the collectives of the device were aborted, since a process ended."""
        self.users = 0
        """Number of open engines."""
        self.coordinators: dict[RankGroup, Any] = {}
        """Coordinator of all engines of one data-parallel group."""
        self._groups: dict[Partition, RankGroup] = {}
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # otherwise NCCL would create a context on the first device
        self._timeout = _default_timeout()
        default_store = distributed_c10d._get_default_store()
        assert isinstance(default_store, distributed_c10d.PrefixStore)
        # Without PyTorch's own prefix, which a successor of a process could not know; see [Note: rosters].
        self._store = group_prefix(default_store.underlying_store)
        self.device = device
        with explain_peer_failure(self):
            store_barrier(self._store, self.rank, self.size, self._timeout.total_seconds())
        self.everyone = self.group((tuple(range(self.size)),))
        """All processes."""
        self._checkpoints: dist.ProcessGroup | None = None
        self.watch = DeadlockWatch(distributed_c10d.PrefixStore("watch", self._store), self.rank, self.size)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
        self.members = self.all_gather_object(me)
        number = self._store.add("worlds", 1) if self.rank == 0 else 0
        self._prefix = f"{self.all_gather_object(number)[0]}/"

    @classmethod
    def find(cls, device: torch.device) -> "Processes":
        """Return the world that torchrun or the script has set up, or a single process.

        Raises ConfigError if torch.distributed and the environment disagree on the number of processes, and the errors
        of `join`.
        """
        if not dist.is_available():
            return SINGLE_PROCESS
        if not dist.is_initialized():
            launch = Launch.from_environment()
            if launch.size == 1:
                return SINGLE_PROCESS
            join_group(device, launch)
        world_size = os.environ.get("WORLD_SIZE")
        size = dist.get_world_size()
        if world_size is not None and int(world_size) != size:
            raise ConfigError(
                f"torch.distributed was initialised with {size} processes, and WORLD_SIZE says {world_size}: start "
                f"all of them with one torchrun, and leave world_size out of init_process_group"
            )
        if size == 1:
            return SINGLE_PROCESS
        default_group = dist.group.WORLD
        assert default_group is not None
        world = _worlds.get(default_group)
        if world is None or world.closed:
            world = _worlds[default_group] = cls(device)
            world.limit_threads()
        return world

    @property
    def checkpoints(self) -> dist.ProcessGroup:
        """Group for checkpoint collectives, which may run concurrently; all processes create it together."""
        if self._checkpoints is None:
            self._checkpoints = self._new_group("gloo")
        return self._checkpoints

    def _new_group(self, backend: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        order: dict[str, Any] = {}
        if ranks is not None and list(ranks) != sorted(ranks):
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise ConfigError(
                    f"a group of processes {list(ranks)}, not in ascending order, as several replicas or a device "
                    f"mesh need it, takes PyTorch 2.12 or newer, and this is {torch.__version__}: update PyTorch, or "
                    f"use one replica and a mesh in ascending order"
                )
            order = {"sort_ranks": False}
        create: Callable[[], dist.ProcessGroup] = partial(
            dist.new_group, ranks, backend=backend, timeout=self._timeout, **order
        )
        # Other backends connect later. They may depend on the current device, which each thread has its own of.
        return connect(create, self._store, self.rank) if backend == "gloo" else create()

    def group(self, partition: Partition) -> RankGroup:
        """Return this process's group of a partition of all processes; all processes must call this together."""
        if partition not in self._groups:
            backend = dist.get_default_backend_for_device(self.device)
            with explain_peer_failure(self):
                for ranks in partition:
                    alone = len(ranks) == 1
                    control = None if alone else self._new_group("gloo", ranks)
                    data = None if alone else self._new_group(backend, ranks)
                    if self.rank in ranks:
                        self._groups[partition] = RankGroup(self, ranks, control, data)
            own = self._groups[partition]
            if self.device.type != "cpu" and own.size > 1:  # the first call must not be point-to-point
                dist.all_reduce(torch.zeros(1, device=self.device), group=own.data)
        return self._groups[partition]

    @property
    def local_ranks(self) -> Sequence[int]:
        """Ranks of the processes on this machine."""
        host = self.members[self.rank]["host"]
        return [rank for rank, member in enumerate(self.members) if member["host"] == host]

    def limit_threads(self) -> None:
        """Limit PyTorch's threads to this process's fair part of the machine's cores.

        A number set by OMP_NUM_THREADS stays if it fits, except for torchrun's default of 1.
        """
        fair_count = max(1, len(os.sched_getaffinity(0)) // len(self.local_ranks))
        set_by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
        if torch.get_num_threads() > fair_count or set_by_torchrun:
            torch.set_num_threads(fair_count)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather flat tensors of one size from all processes, by rank; raise PeerError if one has ended."""
        return self.everyone.all_gather(own)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        self.everyone.broadcast(tensor, rank)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather JSON-serializable values from all processes, by rank."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([own.numel()], device="cpu"))[:, 0]
        padded = torch.nn.functional.pad(own, (0, int(sizes.max()) - own.numel()))
        rows = self.all_gather(padded)
        return [json.loads(bytes(row[: int(size)].tolist()).decode()) for row, size in zip(rows, sizes, strict=True)]

    def from_first(self, value: _Value) -> _Value:
        """Return a copy of the value that rank 0 passes."""
        own = torch.frombuffer(bytearray(pickle.dumps(None if self.rank else value)), dtype=torch.uint8)
        size = int(self.all_gather(torch.tensor([own.numel()], device="cpu"))[0, 0])
        pickled = own if not self.rank else torch.empty(size, dtype=torch.uint8, device="cpu")
        self.broadcast(pickled, 0)
        first: _Value = pickle.loads(pickled.numpy().tobytes())
        return first

    def agree_on_error(self, own: _Error | None, kind: Callable[[str], _Error]) -> _Error | None:
        """Return this process's error, or else one of type `kind` for the others'; all processes must call this."""
        texts = self.all_gather_object(None if own is None else f"{type(own).__name__}: {own}")
        failures = [f"{self._describe(rank)}: {text}" for rank, text in enumerate(texts) if text is not None]
        return kind("; ".join(failures)) if failures and own is None else own

    def check_agreement(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError with the first difference, unless all processes pass equal facts."""
        facts_of = self.all_gather_object([[name, value] for name, value in facts.items()])
        for rank, others in enumerate(facts_of[1:], start=1):
            for ours, theirs in zip(facts_of[0], others, strict=False):
                if ours != theirs:
                    raise ConfigError(
                        f"processes differ in {ours[0]}: rank 0 has {_short(ours[1], theirs[1])}, "
                        f"rank {rank} has {_short(theirs[1], ours[1])}; all have to build the same model with the "
                        f"same options"
                    )

    # Processes that have ended

    def announce(self, reason: str) -> None:
        """Store the reason why this process leaves, for the errors of the others."""
        with suppress(RuntimeError, dist.DistError):  # the store may be gone too
            self._store.compare_set(f"{self._prefix}why", "", f"{self._describe(self.rank)} {reason}")

    def explain_failure(self, error: BaseException) -> PeerError:
        """Return the error for a failed collective; it names the process that ended."""
        return PeerError(
            f"{self._find_ended()}; rank {self.rank} can't continue alone in {own_call()}, which needs all processes "
            f"({first_line(error)}). No operation was retried: restart all processes from a checkpoint"
        )

    def _describe(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {rank} (process {member['pid']} on {member['host']})"

    def _describe_all(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._describe(rank) for rank in ranks)

    def _find_ended(self) -> str:
        """Describe the process that ended. The first process to find it stores it for the others."""
        if not hasattr(self, "_prefix"):
            return "another process ended at the start"
        local_ranks = self.local_ranks
        deadline = time.monotonic() + ALIVE_TIMEOUT_S
        try:
            self._store.set(f"{self._prefix}alive/{self.rank}", "1")
            while True:
                for key, text in (("gone", "{} ended or does not answer"), ("why", "{}")):
                    if self._store.check([self._prefix + key]):
                        return text.format(self._store.get(self._prefix + key).decode())
                silent = [r for r in range(self.size) if not self._store.check([f"{self._prefix}alive/{r}"])]
                if not silent:
                    return "a collective failed, though all processes answer"
                gone = [rank for rank in silent if rank in local_ranks and not self._is_alive(rank)]
                if gone or time.monotonic() > deadline:
                    self._store.compare_set(f"{self._prefix}gone", "", self._describe_all(gone or silent))
                time.sleep(POLL_S)
        except (RuntimeError, dist.DistError):
            # Without torchrun, rank 0 hosts the store and may have ended.
            gone = [rank for rank in local_ranks if not self._is_alive(rank)]
            if len(gone) > 1:
                return f"{self._describe_all(gone)} ended, one after the other"
            return f"{self._describe_all(gone or [0])} ended or does not answer"

    def _is_alive(self, rank: int) -> bool:
        member = self.members[rank]
        try:
            process = psutil.Process(member["pid"])
            same = abs(process.create_time() - member["started"]) < 1
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def has_lost_process(self) -> bool:
        """Return whether a process of this machine has ended, or another process has found one that has."""
        try:
            found = self._store.check([f"{self._prefix}gone"])
        except (RuntimeError, dist.DistError):
            return True  # the process that hosts the store has ended
        return found or not all(self._is_alive(rank) for rank in self.local_ranks)

    @contextmanager
    def explain_lost_process(self) -> Iterator[None]:
        """Replace the error of a collective inside of an operator, if a process has ended, by one that names it."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, (torch.OutOfMemoryError, PeerError)):
                raise
            if isinstance(error, dist.DistError) or _GLOO in str(error) or self.has_lost_process():
                raise self.explain_failure(error) from error
            raise

    def abort_data(self) -> None:
        """End the collectives of the device, which may wait for a process that has ended."""
        self.aborted = True
        for group in self._groups.values():
            if group.data is not None:
                distributed_c10d._abort_process_group(group.data)

    def abort(self, error: BaseException) -> None:
        """Announce that an engine could not be created here, and close."""
        self.announce(f"could not start: {type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Destroy the groups, once no engine uses them."""
        if self.users or self.closed:
            return
        self.closed = True
        self.watch.close()
        for coordinator in self.coordinators.values():
            coordinator.collectives.close()
        if not dist.is_initialized():
            return
        groups = self._groups.values()
        own = [self._checkpoints, *(each.control for each in groups)]
        for group in own if self.aborted else (*own, *(each.data for each in groups)):
            if group is not None:
                dist.destroy_process_group(group)


Processes = World | SingleProcess
"""The processes that share a model: several, or only this one."""


@contextmanager
def explain_peer_failure(world: "Processes") -> Iterator[None]:
    """Replace PyTorch's error for a lost process by one that names the process."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(world, SingleProcess):
            raise
        raise world.explain_failure(error) from error


def gather_into(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Call `all_gather_into_tensor`, by its name in this version of PyTorch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=async_op)


def _default_timeout() -> timedelta:
    """Return the timeout that `init_process_group` was given. A new group would wait for half an hour for its peers."""
    group = distributed_c10d._get_default_group()
    if not group._device_types:  # a group implemented in Python
        return distributed_c10d.default_pg_timeout
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def _short(value: Any, other: Any) -> str:
    """Format a value for a message; of two lists, the first item that differs."""
    if isinstance(value, list) and isinstance(other, list):
        for ours, theirs in zip(value, other, strict=False):
            if ours != theirs:
                return f"{ours!r}"
        return f"{len(value)} items"
    return repr(value)
