"""The device's memory of one chunk: one storage for life, whose bytes come and go."""

from typing import Protocol

import torch

from patrickstar._memory.vm_pool import PageBank, Range

# [Note: one storage for life]
# Autograd saves views of weights (`weight.t()`), not Parameters, so a chunk's device memory must come back where they
# look for it. Each chunk owns one storage object for as long as it lives: its memory leaves it and comes back,
# and every view that was ever taken sees the new bytes. Writing goes through a fresh alias (`empty(0).set_(storage)`),
# which has its own version counter: moving bytes is not a modification that autograd has to know of.


class DeviceMemory(Protocol):
    """A storage whose memory can be taken and given back."""

    storage: torch.UntypedStorage

    def take(self) -> None:
        """Have memory behind the storage; its content is undefined."""

    def give(self) -> None:
        """Give the memory back; the storage must not be read until it is taken again."""

    def close(self) -> None:
        """Nobody will take it again."""


class ResizedMemory:
    """What PyTorch's allocator gives: the storage is resized to its bytes, and to zero. On a GPU that costs nothing."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    def take(self) -> None:
        self.storage.resize_(self.nbytes)

    def give(self) -> None:
        self.storage.resize_(0)

    def close(self) -> None:
        self.give()


class MovedMemory:
    """A range of addresses that pages move to and from. See [Note: pages that move]."""

    def __init__(self, nbytes: int, bank: PageBank) -> None:
        self.bank = bank
        self.range = Range(nbytes)
        self.storage = self.range.storage()

    def take(self) -> None:
        self.bank.commit(self.range)

    def give(self) -> None:
        self.bank.park(self.range)

    def close(self) -> None:
        self.bank.forget(self.range)


def device_memory(nbytes: int, device: torch.device, bank: PageBank | None) -> DeviceMemory:
    """Memory for a chunk of this size; none of it is taken yet."""
    if bank is None or nbytes == 0:
        return ResizedMemory(nbytes, device)
    return MovedMemory(nbytes, bank)
