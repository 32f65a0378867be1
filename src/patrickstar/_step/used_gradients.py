"""Gradients beside their parameters that an update has used: they are freed for others, or stay while there is room."""

from weakref import WeakMethod

from patrickstar._params.local_shards import LocalShards

# [Note: used gradients]
# With `ps.InBackward()` gradients are in lists of their own, of which budgets set room aside for few: an update is
# waited for before the list of a later chunk needs its memory. Where updates run on the host beside operators, backward
# would go on at their speed then. So lists stay as long as the host has room for them beside what is set aside, until
# their chunk gets its next gradients, and whatever else needs room on the host frees the earliest ones. Which exist
# depends on the budget, and not on the speed of a thread.
#
# Updates from disk are waited for: when anything needs room, operators may hold the memory that these need to end.


class UsedGradients:
    """Chunks with gradients that an update has used, or runs on. See [Note: used gradients].

    Args:
        room_bytes: What budgets set aside for gradients.
    """

    def __init__(self, data: LocalShards, room_bytes: int) -> None:
        self.indices: list[int] = []
        """Indices of these chunks, in the order in which their updates were started."""
        self._data, self._room_bytes = data, room_bytes
        give_back = WeakMethod(self.give_back)  # or an engine that was closed would wait for the garbage collector
        data.manager.host_tier.give_back = lambda: (found := give_back()) is not None and found()

    def add(self, index: int) -> None:
        """Add a chunk whose update was started, while no operator holds parameters, and free what has to be freed.

        At least the gradients of one chunk that is updated exist beside those that the next operator gives, which may
        lie in two: `chunk_mapping.LISTS_AT_ONCE`.
        """
        self.indices = [*(earlier for earlier in self.indices if earlier != index), index]
        for earlier in self.indices[:-1]:
            if not self._may_stay(earlier) and earlier in self.indices:  # making room may have freed it
                self.indices.remove(earlier)
                self._data.free_gradients(earlier)

    def _may_stay(self, index: int) -> bool:
        manager = self._data.manager
        if index not in self._data.by_chunk or not manager.hardware.has_gpu:
            return False
        chunks = self._data.state_chunks(index) + self._data.gradient_sums(index)
        on_host = all(chunk.host.valid and not chunk.device.present for chunk in chunks)
        return on_host and manager.host_tier.free_bytes >= self._room_bytes

    def give_back(self) -> bool:
        """Free the earliest ones for the host, which lacks room. Return False if there is none but the last."""
        if len(self.indices) < 2:
            return False
        self._data.free_gradients(self.indices.pop(0))
        return True
