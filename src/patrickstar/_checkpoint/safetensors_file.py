"""Sequential writer of safetensors files."""

import json
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from patrickstar._checkpoint.direct_writer import DirectWriter
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.direct_io import BLOCK_BYTES, PAGE_BYTES

DENSE_ADVICE = "store it dense and convert it in the forward, or register the buffer with persistent=False"
"""Advice about a sparse tensor, for errors."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}
"""Dtype names of the safetensors format."""
PADDING = "padding."


@dataclass(frozen=True)
class TensorEntry:
    """Tensor of a file; its elements are contiguous and row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    filler: bool = False
    """True for padding: zeros that the caller does not pass to `write`."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile(DirectWriter):
    """New file with the given tensors; `write` takes their bytes in this order, in pieces of any size.

    `metadata` goes into the header. `addresses`: memory addresses, by index in `entries`, of tensors to be written
    without a copy; tensors called `padding.N` precede them, so that address and file offset have the same alignment.
    Buffers a few pages of `page_bytes`. `accelerator`: see `DirectWriter`. Raises CheckpointError if the disk fails, or
    at once if it is full.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[TensorEntry],
        metadata: Mapping[str, str] | None = None,
        *,
        addresses: Mapping[int, int] | None = None,
        page_bytes: int = PAGE_BYTES,
        accelerator: TorchDevice | None = None,
    ) -> None:
        padded = list(_padded(entries, addresses or {}))
        header = _header(padded, metadata or {})
        self.starts: list[int] = []
        """File offset of each tensor of `entries`, in bytes."""
        self._paddings: deque[tuple[int, int]] = deque()
        end = len(header)
        for entry in padded:
            if entry.filler:
                self._paddings.append((end, entry.nbytes))
            else:
                self.starts.append(end)
            end += entry.nbytes
        super().__init__(path, end, page_bytes=page_bytes, accelerator=accelerator)
        self.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, values: torch.Tensor, owner: Hashable = None) -> None:
        """Append contiguous elements. See [Note: zero-copy writes] for `owner`."""
        if self._paddings and self._paddings[0][0] == self.accepted_bytes and values.numel():
            super().write(torch.zeros(self._paddings.popleft()[1], dtype=torch.uint8, device="cpu"))
        super().write(values, owner)


def _padded(entries: Sequence[TensorEntry], addresses: Mapping[int, int]) -> Iterator[TensorEntry]:
    """Yield the tensors and the padding between them. The data section is aligned to a disk block."""
    names = {entry.name for entry in entries}
    end = 0
    for number, entry in enumerate(entries):
        gap = (addresses[number] - end) % BLOCK_BYTES if entry.nbytes and number in addresses else 0
        if gap:
            yield TensorEntry(_unused_name(f"{PADDING}{number}", names), torch.uint8, (gap,), filler=True)
        yield entry
        end += gap + entry.nbytes


def _unused_name(name: str, names: Collection[str]) -> str:
    """Return the name, extended until it is not in `names`."""
    while name in names:
        name += "_"
    return name


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return length and header, padded with spaces so that the data section is aligned to a disk block."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        assert entry.name not in fields, f"{entry.name} occurs twice"
        fields[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // BLOCK_BYTES) * BLOCK_BYTES - 8
    return length.to_bytes(8, "little") + text.ljust(length)
