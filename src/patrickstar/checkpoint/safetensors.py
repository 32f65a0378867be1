"""Safetensors files, written from front to back: any tool that knows the format reads them."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from patrickstar.checkpoint.page_file import PageFile
from patrickstar.memory.scratch import BLOCK_BYTES, PAGE_BYTES

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
    torch.bool: "BOOL",
}
"""The format's names of what tensors are made of."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its elements lie in a row, in the order of the shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A new file with these tensors, one after the other; their bytes are handed in in this order, in any pieces.

    `metadata` is text by text for the header. Memory is a few pages of `page_bytes`. Raises CheckpointError if the disk
    is full, before anything is handed in, or if it fails.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[Entry],
        metadata: Mapping[str, str] | None = None,
        *,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        header = _header(entries, metadata or {})
        self.starts: list[int] = []
        """Where each tensor begins in the file."""
        end = len(header)
        for entry in entries:
            self.starts.append(end)
            end += entry.nbytes
        self.file = PageFile(path, end, page_bytes=page_bytes)
        self.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, values: torch.Tensor, owner: Hashable = None) -> None:
        """Hand in the next elements, contiguous. See [Note: bytes that stay where they are] for `owner`."""
        self.file.write(values, owner)

    def close(self) -> None:
        """Have all of it on the disk when this returns."""
        self.file.close()

    def abandon(self) -> None:
        """Leave it as it is."""
        self.file.abandon()


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
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
