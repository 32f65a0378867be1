"""Pages of chunks in a dry run of a CPU: how many the pool would have mapped, without any."""

import torch

from patrickstar._hardware.vm_pool import PagePool, VMRange, round_up


class SimulatedRange(VMRange):
    """Range of addresses that nothing can be read from."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.backed_bytes = round_up(nbytes), 0
        self._shown_bytes = nbytes

    def storage(self) -> torch.UntypedStorage:
        """Return a storage of as many bytes, on the meta device."""
        storage = torch.empty(0, dtype=torch.uint8, device="meta").untyped_storage()
        storage.resize_(self._shown_bytes)
        return storage


class SimulatedPagePool(PagePool):
    """Pool that counts pages: those of freed chunks stay mapped, and leave tensors and freed blocks less room."""

    def new_range(self, nbytes: int) -> VMRange:
        return SimulatedRange(nbytes)

    def commit(self, target: VMRange) -> None:
        new_bytes = max(0, target.nbytes - self.parked_bytes)
        self.parked_bytes -= target.nbytes - new_bytes
        self.mapped_bytes += new_bytes
        target.backed_bytes = target.nbytes

    def decommit(self, source: VMRange) -> None:
        self.parked_bytes += source.nbytes
        source.backed_bytes = 0

    def trim(self, keep_bytes: int) -> None:
        excess = max(0, self.parked_bytes - max(0, keep_bytes))
        excess = min(self.parked_bytes, round_up(excess))
        self.parked_bytes -= excess
        self.mapped_bytes -= excess

    def release(self, source: VMRange) -> None:
        self.mapped_bytes -= source.backed_bytes
        source.backed_bytes = 0
