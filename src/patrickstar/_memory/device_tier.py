"""The compute tier: its budget, and which chunks have memory on the device."""

from patrickstar._memory.chunk import Chunk
from patrickstar._memory.hardware import Hardware


class DeviceTier:
    """Device memory of chunks, under a budget that they share with non-model data."""

    def __init__(self, hardware: Hardware, budget_bytes: int, poison: bool) -> None:
        self.device = hardware.device
        self.budget_bytes = budget_bytes
        self.poison = poison
        self.page_pool = hardware.page_pool()
        """Where pages wait that no chunk has at the moment, for the next that takes some."""
        self.non_model_bytes = 0
        """What the budget has to hold beside chunks, as far as is known at this moment."""
        self.soft_limit_bytes = budget_bytes
        """What of the budget may be filled while more of non-model data may come."""
        self.used = 0
        self.peak = 0
        self.moved: set[Chunk] = set()
        """Chunks whose memory came or went since somebody last looked."""

    @property
    def chunkable_bytes(self) -> int:
        """What the budget leaves for chunks at this moment."""
        return self.budget_bytes - self.non_model_bytes

    @property
    def within_soft_limit_bytes(self) -> int:
        """What chunks may fill without hardship."""
        return min(self.soft_limit_bytes, self.budget_bytes) - self.non_model_bytes

    @property
    def resident_bytes(self) -> int:
        """Memory of this machine, or of the GPU, that the tier takes."""
        return self.used if self.page_pool is None else self.page_pool.mapped_bytes

    def new(self, kind: str, index: int, numel: int, dtype: str) -> Chunk:
        """Make a chunk that can have its memory here. It has none yet, on no tier."""
        return Chunk(kind, index, numel, dtype, self.device, self.page_pool)

    def allocate(self, chunk: Chunk) -> None:
        """Have memory for a chunk, for which there is room; its content is undefined."""
        chunk.allocate_device()
        self.moved.add(chunk)
        self.used += chunk.nbytes
        self.peak = max(self.peak, self.used)

    def free(self, chunk: Chunk) -> None:
        """Take a chunk's memory back."""
        chunk.wait_for_save()
        chunk.free_device(self.poison)
        self.moved.add(chunk)
        self.used -= chunk.nbytes

    def trim(self, limit_bytes: int) -> None:
        """Give pages that wait for the next chunk back to the machine, but for so many bytes."""
        if self.page_pool is not None:
            self.page_pool.trim(limit_bytes - self.used)

    def reset_peak(self) -> None:
        """Begin to look for the most that is used."""
        self.peak = self.used
