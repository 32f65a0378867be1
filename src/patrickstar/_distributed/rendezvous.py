"""Rendezvous: the processes that a launcher started join one process group, after a restart as well."""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import distributed_c10d

from patrickstar._distributed.group_creation import connect
from patrickstar._distributed.roster import RosterAgreement, group_prefix
from patrickstar._distributed.torch_errors import first_line
from patrickstar._hardware.compute_device import find_device
from patrickstar.errors import ConfigError, PeerError

JOIN_TIMEOUT_S = 600.0
"""Seconds to wait for all processes, by default: as long as torchrun waits for all machines."""


def join(timeout: float = JOIN_TIMEOUT_S) -> None:
    """Join the processes of this run; call it instead of `torch.distributed.init_process_group`.

    Unlike that function it also works when torchrun has restarted the processes, as many as before or another number.
    It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun and other launchers set; without RANK and
    WORLD_SIZE the process is a group of one. The group communicates by gloo between CPUs and by the accelerator's own
    backend, such as NCCL, between accelerators; the one of LOCAL_RANK becomes the current device. The group is
    destroyed when the process exits. If there is a process group already, nothing is done.

    Args:
        timeout: Seconds to wait for the other processes.

    Raises:
        ConfigError: A variable is missing or invalid, or MASTER_ADDR can't be reached.
        PeerError: Other processes did not join in time, or ended meanwhile; the message names their ranks.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout} leaves no time to join; use a number of seconds, such as 600")
    if not dist.is_initialized():
        join_group(find_device(), Launch.from_environment(), timeout)


@dataclass(frozen=True)
class Launch:
    """Rank of this process, and number of processes that the launcher started."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read RANK and WORLD_SIZE; without both, this is the only process. Raise ConfigError if they are invalid."""
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or size is None:
            return cls()
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise ConfigError(
                f"RANK is {rank!r} and WORLD_SIZE {size!r}: RANK must be a number from 0 to WORLD_SIZE - 1; start the "
                f"processes with torchrun, or unset both for one process"
            )
        return cls(int(rank), int(size))


def join_group(device: torch.device, launch: Launch, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Create the default process group with a backend for the device and one for the CPU; destroy it at exit."""
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    if launch.size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        agreement = RosterAgreement(_open_store(launch, timeout_s), launch.rank, launch.size)
        _connect(backend, device, agreement.agree(timeout_s), launch)
        if launch.rank == 0:
            agreement.delete_earlier()
    atexit.register(_destroy_process_group)


def _open_store(launch: Launch, timeout_s: float) -> Store:
    """Return the store of torchrun's agent, or else the one that rank 0 hosts."""
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (KeyError, ValueError, RuntimeError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(
            f"RANK and WORLD_SIZE say that this is one of {launch.size} processes, but it can't join the others "
            f"({reason}); start all of them with torchrun, or unset both for one process"
        ) from error


def _connect(backend: str, device: torch.device, store: Store, launch: Launch) -> None:
    """Create the default process group of a roster."""

    def create() -> None:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # each thread has its own
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size)

    store.set_timeout(distributed_c10d.default_pg_timeout)
    try:
        connect(create, group_prefix(store), launch.rank)
    except RuntimeError as error:
        raise PeerError(
            f"rank {launch.rank} of {launch.size} can't connect to the others: one of them has ended since it joined, "
            f"or can't be reached ({first_line(error)}). Restart all processes; if it happens again, select the "
            f"network interface with GLOO_SOCKET_IFNAME"
        ) from error


def _destroy_process_group() -> None:
    """Destroy the default group at exit. gloo's threads would abort a process that ends without it."""
    if dist.is_initialized():
        dist.destroy_process_group()
