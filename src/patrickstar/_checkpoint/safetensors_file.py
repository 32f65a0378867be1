"""Safetensors files, written from front to back: any tool that knows the format reads them."""

import json
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from patrickstar._checkpoint.direct_writer import DirectWriter
from patrickstar._memory.swap_file import BLOCK_BYTES, PAGE_BYTES

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
"""The format's names of what tensors are made of."""
PADDING = "padding."


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its elements lie in a row, in the order of the shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    filler: bool = False
    """Whether it means nothing, and is zeros that nobody hands in."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A new file with these tensors, one after the other; their bytes are handed in in this order, in any pieces.

    `metadata` is text by text for the header. `addresses`: where in memory tensors lie that shall go to the disk from
    there, by their places in `entries`; others, called `padding.N`, are put before them, so that they begin at the same
    place of a block in the file. Memory is a few pages of `page_bytes`. Raises CheckpointError if the disk is full,
    before anything is handed in, or if it fails.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[TensorEntry],
        metadata: Mapping[str, str] | None = None,
        *,
        addresses: Mapping[int, int] | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        padded = list(_padded(entries, addresses or {}))
        header = _header(padded, metadata or {})
        self.starts: list[int] = []
        """Where each tensor of `entries` begins in the file."""
        self._paddings: deque[tuple[int, int]] = deque()
        end = len(header)
        for entry in padded:
            if entry.filler:
                self._paddings.append((end, entry.nbytes))
            else:
                self.starts.append(end)
            end += entry.nbytes
        self.file = DirectWriter(path, end, page_bytes=page_bytes)
        self.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, values: torch.Tensor, owner: Hashable = None) -> None:
        """Hand in the next elements, contiguous. See [Note: bytes that stay where they are] for `owner`."""
        if self._paddings and self._paddings[0][0] == self.file.taken and values.numel():
            self.file.write(torch.zeros(self._paddings.popleft()[1], dtype=torch.uint8, device="cpu"))
        self.file.write(values, owner)

    def close(self) -> None:
        """Have all of it on the disk when this returns."""
        self.file.close()

    def abandon(self) -> None:
        """Leave it as it is."""
        self.file.abandon()


def _padded(entries: Sequence[TensorEntry], addresses: Mapping[int, int]) -> Iterator[TensorEntry]:
    """The tensors, and what has to be between them. Data begin with a block of the disk."""
    names = {entry.name for entry in entries}
    end = 0
    for number, entry in enumerate(entries):
        gap = (addresses[number] - end) % BLOCK_BYTES if entry.nbytes and number in addresses else 0
        if gap:
            yield TensorEntry(_unlike(f"{PADDING}{number}", names), torch.uint8, (gap,), filler=True)
        yield entry
        end += gap + entry.nbytes


def _unlike(name: str, names: Collection[str]) -> str:
    """The name, or one like it that is not among these."""
    while name in names:
        name += "_"
    return name


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The length of the header, and the header, filled up with spaces so that data begin with a block of the disk."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        assert entry.name not in described, f"{entry.name} is there twice"
        described[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // BLOCK_BYTES) * BLOCK_BYTES - 8
    return length.to_bytes(8, "little") + text.ljust(length)
