"""Limits of the memory that PyTorch's caching allocator reserves on one device. See [Note: reserved memory]."""

from collections.abc import Callable
from weakref import WeakKeyDictionary, finalize


class ReservedLimits:
    """Limits of the engines of this process, of which the largest applies: each counts the memory of all as its own.

    The limit that the allocator had before the first engine is kept if it is smaller, and comes back after the last.

    Args:
        get: Returns the allocator's limit in bytes.
        set: Sets it.
    """

    def __init__(self, get: Callable[[], int], set: Callable[[int], None]) -> None:
        self._get, self._set = get, set
        self._limits: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._before: int | None = None
        """The limit before the first engine."""

    def add(self, owner: object, nbytes: int) -> None:
        """Limit what is reserved to `nbytes`, until `remove` or until the owner ends.

        Args:
            owner: What the limit belongs to.
            nbytes: Limit in bytes.
        """
        if self._before is None:
            self._before = self._get()
        if owner not in self._limits:
            finalize(owner, self._apply).atexit = False
        self._limits[owner] = nbytes
        self._apply()

    def remove(self, owner: object) -> None:
        """Withdraw the limit of an owner, if it has one."""
        if self._limits.pop(owner, None) is not None:
            self._apply()

    def _apply(self) -> None:
        if self._before is None:
            return
        if self._limits:
            self._set(min(self._before, max(self._limits.values())))
        else:
            self._set(self._before)
            self._before = None
