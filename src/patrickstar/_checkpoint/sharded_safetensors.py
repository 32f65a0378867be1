"""Hugging Face model folder: sharded safetensors, their index, and text files."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from patrickstar._checkpoint.direct_writer import write_error
from patrickstar._checkpoint.safetensors_file import SafetensorsFile, TensorEntry

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shards_of(entries: Sequence[TensorEntry], max_bytes: int) -> dict[str, list[TensorEntry]]:
    """Group tensors into files of at most `max_bytes` (or one tensor); return them by file name."""
    shards: list[list[TensorEntry]] = [[]]
    shard_bytes = 0
    for entry in entries:
        if shards[-1] and shard_bytes + entry.nbytes > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(entry)
        shard_bytes += entry.nbytes
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    # Wide dtypes first, so that each tensor is aligned to its item size.
    ordered = [sorted(shard, key=lambda entry: -entry.dtype.itemsize) for shard in shards]
    return dict(zip(names if count > 1 else ["model.safetensors"], ordered, strict=True))


def write_model_folder(
    folder: Path, shards: Mapping[str, Sequence[TensorEntry]], values: Iterator[torch.Tensor], texts: Mapping[str, str]
) -> None:
    """Write the shards from a stream of their elements, their index, and `texts` by file name.

    Raises CheckpointError if the disk is full or fails.
    """
    for name, shard in shards.items():
        file = SafetensorsFile(folder / name, shard, {"format": "pt"})
        try:
            remaining = sum(entry.nbytes for entry in shard)
            while remaining:
                piece = next(values)
                file.write(piece)
                remaining -= piece.nbytes
            file.close()
        except BaseException:
            file.abandon()
            raise
    if len(shards) > 1:
        entries = [(entry, name) for name, shard in shards.items() for entry in shard]
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry, _ in entries)},
            "weight_map": {entry.name: name for entry, name in sorted(entries, key=lambda item: item[0].name)},
        }
        texts = {**texts, "model.safetensors.index.json": json.dumps(index, indent=2) + "\n"}
    for name, text in texts.items():
        _write_text(folder / name, text)


def _write_text(path: Path, text: str) -> None:
    data = text.encode()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path, error, len(data)) from error
