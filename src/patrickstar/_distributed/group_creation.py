"""Creation of process groups, with waits that end when a process of the group has been restarted."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from torch._C._distributed_c10d import Store

from patrickstar._distributed.roster import POLL_S, format_ranks
from patrickstar.errors import PeerError

_Group = TypeVar("_Group")


def store_barrier(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all processes of a group have called this as often as this one.

    Return at once in a group that the script has created, since its store may have entries of earlier processes.

    Args:
        store: The group's store, as `group_prefix` returns it.
        rank, size: Rank of this process, and number of processes.
        timeout_s: Seconds to wait for the others.

    Raises:
        PeerError: A process has ended, or did not call in time.
    """
    if not store.check(["joined"]):
        return
    number = store.add(f"barriers/{rank}", 1)
    store.set(f"barrier/{number}/{rank}", "")
    keys = [f"barrier/{number}/{other}" for other in range(size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        check_replaced(store, rank)
        if time.monotonic() > deadline:
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            raise PeerError(
                f"rank {rank} has waited {timeout_s:g} s for {format_ranks(absent)}, which did not create an engine or "
                f"has ended: create engines in all processes, or restart all from a checkpoint"
            )
        time.sleep(POLL_S)


def connect(create: Callable[[], _Group], store: Store, rank: int) -> _Group:
    """Call a function of PyTorch that connects all processes of a group, and return its result.

    The function waits in C++ without interruption, for half an hour if one of the processes has ended. So it runs in a
    thread, which is abandoned when a process has been restarted, or with Ctrl-C.

    Args:
        create: Function that creates a group.
        store: The group's store, as `group_prefix` returns it.
        rank: Rank of this process.

    Raises:
        PeerError: A process has ended, and was restarted.
    """
    created: Future[_Group] = Future()

    def run() -> None:
        try:
            created.set_result(create())
        except BaseException as error:
            created.set_exception(error)

    thread = Thread(target=run, name="patrickstar-connect", daemon=True)
    thread.start()
    thread.join(POLL_S)
    # The function may wait with the lock of its connection to the store.
    own_store: Store = store.clone() if thread.is_alive() else store  # type: ignore[attr-defined]
    while thread.is_alive():
        check_replaced(own_store, rank)
        thread.join(POLL_S)
    return created.result()


def check_replaced(store: Store, rank: int) -> None:
    """Raise PeerError if a process of this group was restarted: the group will never be complete."""
    if store.check(["replaced"]):
        raise PeerError(
            f"rank {store.get('replaced').decode()} ended and was restarted while rank {rank} waited for it: restart "
            f"all processes from a checkpoint"
        )
