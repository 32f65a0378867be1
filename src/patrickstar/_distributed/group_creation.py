"""Creation of process groups: waits for all processes, which end when one of them has been started anew."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from torch._C._distributed_c10d import Store

from patrickstar._distributed.roster import POLL_S, format_ranks
from patrickstar.errors import PeerError

_Group = TypeVar("_Group")


def call_roll(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all processes of a group have called this as often as this one.

    A group of the script's own, whose store may have entries of earlier processes, calls no roll.

    Args:
        store: The group's store, as `group_prefix` returns it.
        rank, size: Rank of this process, and number of processes.
        timeout_s: Seconds to wait for the others.

    Raises:
        PeerError: A process has ended, or did not call in time.
    """
    if not store.check(["joined"]):
        return
    number = store.add(f"calls/{rank}", 1)
    store.set(f"call/{number}/{rank}", "")
    keys = [f"call/{number}/{other}" for other in range(size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        check_replaced(store, rank)
        if time.monotonic() > deadline:
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            raise PeerError(
                f"rank {rank} has waited {timeout_s:g} s for {format_ranks(absent)} to create an engine: it has ended, "
                f"or never does; restart all processes from a checkpoint"
            )
        time.sleep(POLL_S)


def connect(create: Callable[[], _Group], store: Store, rank: int) -> _Group:
    """Call a function of PyTorch that connects all processes of a group, and return its result.

    The function waits in C++, for half an hour if one of the processes has ended, and nothing can interrupt it. So it
    runs in a thread, which is abandoned if the wait has become vain, or with Ctrl-C.

    Args:
        create: Function that creates a group.
        store: The group's store, as `group_prefix` returns it.
        rank: Rank of this process.

    Raises:
        PeerError: A process has ended, and was started anew.
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
    """Raise PeerError if a process of this group was started anew: the group will never be complete."""
    if store.check(["replaced"]):
        raise PeerError(
            f"rank {store.get('replaced').decode()} has ended, and was started anew, while rank {rank} waited for it: "
            f"restart all processes from a checkpoint"
        )
