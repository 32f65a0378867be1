"""The processes that train together: who they are, what they have to agree on, and which of them has ended."""

import atexit
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from patrickstar.errors import ConfigError, PeerError

_Error = TypeVar("_Error", bound=Exception)

ROLL_CALL_S = 10.0
"""How long those on other machines have to answer, once one process was found to be gone."""
POLL_S = 0.1
LOOK_S = 50e-6
"""Between two looks for what the others say."""


_worlds: "WeakKeyDictionary[dist.ProcessGroup, World]" = WeakKeyDictionary()
"""One for each of torch's process groups: its rounds are one sequence, whichever engine speaks."""


class World:
    """One process among several, as torch.distributed knows it."""

    def __init__(self, device: torch.device) -> None:
        """Make groups of its own for words and for bytes; all processes have to come."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.closed = False
        self.users = 0
        """Engines that were made in it, and have not been closed."""
        self.coordinator: Any = None
        """Where these meet those of the others, once there is one."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # or NCCL would take the first one, and a context on it
        self.control = dist.new_group(backend="gloo")
        self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=self.data)  # point to point can't be the first call
        self._checkpoints: dist.ProcessGroup | None = None
        self._store = distributed_c10d.PrefixStore("patrickstar", distributed_c10d._get_default_store())
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
        self.members = self.all_gather_object(me)
        number = self._store.add("worlds", 1) if self.rank == 0 else 0
        self._prefix = f"{self.all_gather_object(number)[0]}/"

    @classmethod
    def find(cls, device: torch.device) -> "World | None":
        """The processes that torchrun started, or the script joined by itself; None where there is just this one.

        Raises ConfigError where torch.distributed and the environment disagree on how many there are, or where the
        others can't be joined.
        """
        said = os.environ.get("WORLD_SIZE")
        if not dist.is_available() or (not dist.is_initialized() and (said is None or "RANK" not in os.environ)):
            return None
        if not dist.is_initialized():
            if said == "1":
                return None
            try:
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            except (RuntimeError, ValueError, dist.DistError) as error:
                raise ConfigError(
                    f"RANK and WORLD_SIZE say that this is one of {said} processes, but it can't join the others "
                    f"({_first_line(error)}); start all of them with torchrun, or unset both for one process"
                ) from error
            atexit.register(_destroy_process_group)
        size = dist.get_world_size()
        if said is not None and int(said) != size:
            raise ConfigError(
                f"torch.distributed was initialised with {size} processes, and WORLD_SIZE says {said}: start all of "
                f"them with one torchrun, and leave world_size out of init_process_group"
            )
        if size == 1:
            return None
        everybody = dist.group.WORLD
        assert everybody is not None
        found = _worlds.get(everybody)
        if found is None or found.closed:
            found = _worlds[everybody] = cls(device)
            found.limit_threads()
        return found

    @property
    def checkpoints(self) -> dist.ProcessGroup:
        """A group for checkpoints, whose collectives may run beside all others; at first all have to come for it."""
        if self._checkpoints is None:
            self._checkpoints = dist.new_group(backend="gloo")
        return self._checkpoints

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of those on the same machine."""
        here = self.members[self.rank]["host"]
        return [rank for rank, member in enumerate(self.members) if member["host"] == here]

    def limit_threads(self) -> None:
        """Have PyTorch's threads of all processes on this machine fit its cores.

        A number that was asked for by OMP_NUM_THREADS stays, if it fits; the 1 that torchrun sets by itself does not.
        """
        fair = max(1, len(os.sched_getaffinity(0)) // len(self.local_ranks))
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
        if torch.get_num_threads() > fair or by_torchrun:
            torch.set_num_threads(fair)

    def all_gather(self, word: torch.Tensor) -> torch.Tensor:
        """What all say: flat tensors of one size, by rank. Raises PeerError if one has ended.

        Waits in Python, where Ctrl-C is heard.
        """
        words = torch.empty(self.size * word.numel(), dtype=word.dtype, device="cpu")
        try:
            work = gather_into(words, word, self.control, async_op=True)
            while not work.is_completed():
                time.sleep(LOOK_S)
            work.wait()
        except (RuntimeError, dist.DistError) as error:
            raise self.explain_failure(error) from error
        return words.view(self.size, -1)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Have what one process has everywhere, in a tensor on the host."""
        try:
            dist.broadcast(tensor, group_src=rank, group=self.control)
        except (RuntimeError, dist.DistError) as error:
            raise self.explain_failure(error) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        """Plain data (what JSON can say) of all, by rank."""
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([said.numel()], device="cpu"))[:, 0]
        padded = torch.nn.functional.pad(said, (0, int(sizes.max()) - said.numel()))
        found = self.all_gather(padded)
        return [json.loads(bytes(row[: int(size)].tolist()).decode()) for row, size in zip(found, sizes, strict=True)]

    def agree_on_error(self, own: _Error | None, kind: Callable[[str], _Error]) -> _Error | None:
        """What went wrong here, or else, as a `kind` of error, in others; None if all is well. All have to come."""
        said = self.all_gather_object(None if own is None else f"{type(own).__name__}: {own}")
        told = [f"{self._name(rank)}: {text}" for rank, text in enumerate(said) if text is not None]
        return kind("; ".join(told)) if told and own is None else own

    def check_agreement(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError, naming the first difference, unless all processes say the same."""
        everybody = self.all_gather_object([[name, value] for name, value in facts.items()])
        for rank, said in enumerate(everybody[1:], start=1):
            for ours, theirs in zip(everybody[0], said, strict=False):
                if ours != theirs:
                    raise ConfigError(
                        f"processes differ in {ours[0]}: rank 0 has {_short(ours[1], theirs[1])}, "
                        f"rank {rank} has {_short(theirs[1], ours[1])}; all have to build the same model with the "
                        f"same options"
                    )

    # Those that have ended

    def announce(self, why: str) -> None:
        """Tell those who will miss this process why it does not take part any more."""
        with suppress(RuntimeError, dist.DistError):  # the store may be gone too
            self._store.compare_set(f"{self._prefix}why", "", f"{self._name(self.rank)} {why}")

    def explain_failure(self, error: BaseException) -> PeerError:
        """Who has ended, told by a collective that failed."""
        return PeerError(
            f"{self._who_ended()}; rank {self.rank} can't go on alone ({_first_line(error)}). Nothing was tried again: "
            f"start all processes anew from a saved state"
        )

    def _name(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {rank} (process {member['pid']} on {member['host']})"

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._name(rank) for rank in ranks)

    def _who_ended(self) -> str:
        """What is known of it. The first to find out tells the others."""
        if not hasattr(self, "_prefix"):
            return "another process ended at the start"
        here = self.local_ranks
        deadline = time.monotonic() + ROLL_CALL_S
        try:
            self._store.set(f"{self._prefix}alive/{self.rank}", "1")
            while True:
                for key, text in (("gone", "{} ended or does not answer"), ("why", "{}")):
                    if self._store.check([self._prefix + key]):
                        return text.format(self._store.get(self._prefix + key).decode())
                silent = [r for r in range(self.size) if not self._store.check([f"{self._prefix}alive/{r}"])]
                if not silent:
                    return "a collective failed, though all processes answer"
                gone = [rank for rank in silent if rank in here and not self._lives(rank)]
                if gone or time.monotonic() > deadline:
                    self._store.compare_set(f"{self._prefix}gone", "", self._names(gone or silent))
                time.sleep(POLL_S)
        except (RuntimeError, dist.DistError):
            # Without torchrun the store is rank 0's.
            gone = [rank for rank in here if not self._lives(rank)]
            if len(gone) > 1:
                return f"{self._names(gone)} ended, one after the other"
            return f"{self._names(gone or [0])} ended or does not answer"

    def _lives(self, rank: int) -> bool:
        member = self.members[rank]
        try:
            process = psutil.Process(member["pid"])
            same = abs(process.create_time() - member["started"]) < 1
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def abort(self, error: BaseException) -> None:
        """An engine could not be made here: the others need not wait for it."""
        self.announce(f"could not begin: {type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Give the groups back, once no engine uses them."""
        if self.users or self.closed:
            return
        self.closed = True
        if self.coordinator is not None:
            self.coordinator.collectives.close()
        if dist.is_initialized():
            for group in (self.control, self.data, self._checkpoints):
                if group is not None:
                    dist.destroy_process_group(group)


def _destroy_process_group() -> None:
    """At the end of a process that was not in torch's process group before."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_into(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    """`all_gather_into_tensor`, by the name that this PyTorch gives it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=async_op)


def _first_line(error: BaseException) -> str:
    """What went wrong, without where in PyTorch's sources that was, and advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if not lines[0].startswith("[/"):
        return lines[0]
    return lines[0].partition("] ")[2].partition(". ")[0]


def _short(value: Any, other: Any) -> str:
    """A value for a message; of two lists the first item that differs."""
    if isinstance(value, list) and isinstance(other, list):
        for ours, theirs in zip(value, other, strict=False):
            if ours != theirs:
                return f"{ours!r}"
        return f"{len(value)} of them"
    return repr(value)
