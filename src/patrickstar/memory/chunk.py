"""A chunk: a contiguous buffer that lies on the device, on the host, or, as a duplicate, on both."""

from dataclasses import dataclass

import torch

from patrickstar.layout.lists import ITEMSIZE

# [Note: one storage for life]
# Autograd saves views of weights (`weight.t()`), not Parameters, so a chunk's device memory must come back where those
# views look for it. Each chunk owns one storage object for as long as it lives: leaving the device resizes it to zero
# bytes, coming back resizes it up and writes in place, and every view that was ever taken sees the new bytes.
# Writing goes through a fresh alias (`empty(0).set_(storage)`), which has its own version counter: moving bytes is not
# a modification that autograd has to know of.

PINNED_READ_WRITE = 0


@dataclass(frozen=True)
class Region:
    """Elements of a chunk seen as a tensor: first element, shape and strides, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Chunk:
    """One chunk of one list. `device_valid` and `host_valid` say which copies hold the current bytes."""

    def __init__(self, kind: str, index: int, numel: int, dtype: str, device: torch.device) -> None:
        self.kind = kind
        self.index = index
        self.numel = numel
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.nbytes = numel * ITEMSIZE[dtype]
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.host: torch.Tensor | None = None
        self.device_valid = False
        self.host_valid = False
        self.pins = 0
        self.moved_bytes = 0

    def __repr__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory this chunk takes, whether they hold its current content or not."""
        return 0 if self.host is None else self.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory this chunk takes."""
        return self.storage.nbytes()

    def on_device(self, region: Region) -> torch.Tensor:
        """A view of the device copy with its own version counter. See [Note: one storage for life]."""
        alias = torch.empty(0, dtype=self.dtype, device=self.device)
        return alias.set_(self.storage, region.offset, region.shape, region.strides)

    def on_host(self, region: Region) -> torch.Tensor:
        """A view of the host copy."""
        assert self.host is not None, f"{self} has no host copy"
        return self.host.as_strided(region.shape, region.strides, region.offset)

    def current(self, region: Region) -> torch.Tensor:
        """A view of a copy that holds the current bytes, the device's if there are two."""
        assert self.device_valid or self.host_valid, f"{self} holds nothing"
        return self.on_device(region) if self.device_valid else self.on_host(region)

    @property
    def read_storage(self) -> torch.UntypedStorage:
        """The storage that readers find: the device's, unless only the host has the bytes."""
        if self.host is not None and not self.device_valid:
            return self.host.untyped_storage()
        return self.storage

    @property
    def whole(self) -> Region:
        """All elements, in a row."""
        return Region(0, (self.numel,), (1,))

    def allocate_device(self) -> None:
        """Take device memory; its content is undefined."""
        self.storage.resize_(self.nbytes)

    def free_device(self, poison: bool) -> None:
        """Give the device memory back, filled with NaN first where a test asks for it."""
        if poison:
            fill_poison(self.on_device(self.whole))
        self.storage.resize_(0)
        self.device_valid = False

    def allocate_host(self) -> torch.Tensor:
        """Take host memory, page-locked in place when the device is a GPU; its content is undefined."""
        self.host = torch.empty(self.numel, dtype=self.dtype)
        if self.device.type == "cuda" and self.nbytes:
            # PyTorch's own pinned allocator would round the chunk up to a power of two.
            status = torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), self.nbytes, PINNED_READ_WRITE)
            if int(status) != 0:
                raise MemoryError(f"cudaHostRegister could not lock {self.nbytes} bytes of {self}: error {int(status)}")
        return self.host

    def free_host(self, poison: bool) -> None:
        """Give the host memory back."""
        assert self.host is not None
        if poison:
            fill_poison(self.host)
        if self.device.type == "cuda" and self.nbytes:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())
        self.host = None
        self.host_valid = False


def fill_poison(buffer: torch.Tensor) -> None:
    """Fill with what no computation survives unnoticed: NaN, or the largest integer."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).max)
