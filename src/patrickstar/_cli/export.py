"""The command ``patrickstar export``: convert a checkpoint to a model folder for other programs."""

import json
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from patrickstar._checkpoint.atomic_dir import AtomicDir
from patrickstar._checkpoint.hf_export import PRECISIONS, shards_of, write_model_folder
from patrickstar._checkpoint.metadata import model_tensors
from patrickstar._checkpoint.safetensors_file import TensorEntry
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli.console import print_text
from patrickstar._cli.run_checkpoints import RunMetadata, newest_in
from patrickstar._cli.tokenizer import END_TOKEN
from patrickstar._kernels.rounding import rounded
from patrickstar._layout.byte_size import format_size, parse_size


def export(
    checkpoint: Path, folder: Path, dtype: Literal["bf16", "fp16", "fp32"], max_shard: str, console: Console
) -> None:
    """Write a model folder from a checkpoint, or from the newest one in a folder, tensor by tensor.

    Raises:
        CheckpointError: The checkpoint is damaged or not from ``patrickstar train``, or the folder cannot be written.
    """
    reader = CheckpointReader(newest_in(checkpoint))
    metadata = RunMetadata.read(reader)
    names = model_tensors(reader)
    target_dtype = PRECISIONS[dtype]
    entries = [
        _tensor_entry(reader, name, target_dtype if is_parameter else None) for name, is_parameter in names.items()
    ]
    shards = shards_of(entries, parse_size(max_shard))
    partial = AtomicDir(folder, over_empty=True)
    try:
        values = (
            rounded(reader.tensor(f"model.{entry.name}"), entry.dtype) for shard in shards.values() for entry in shard
        )
        write_model_folder(partial.path, shards, values, _text_files(metadata, target_dtype))
        partial.rename_into_place()
    except BaseException:
        partial.abandon()
        raise
    nbytes = sum(entry.nbytes for entry in entries)
    print_text(console, f"{folder}: {len(entries)} tensors, {format_size(nbytes)} in {dtype}, from {reader.folder}")


def _tensor_entry(reader: CheckpointReader, name: str, dtype: torch.dtype | None) -> TensorEntry:
    entry = reader.manifest.tensors[f"model.{name}"]
    saved: torch.dtype = getattr(torch, entry.dtype)
    return TensorEntry(name, dtype if dtype is not None and saved.is_floating_point else saved, tuple(entry.shape))


def _text_files(metadata: RunMetadata, dtype: torch.dtype) -> dict[str, str]:
    """Return configuration and tokenizer files by name, in the format of transformers."""
    fields = json.loads(metadata.config)
    fields |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": True, "architectures": [metadata.architecture]}
    texts = {"config.json": json.dumps(fields, indent=2, sort_keys=True) + "\n", "tokenizer.json": metadata.tokenizer}
    if metadata.trained:
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN}
        texts["tokenizer_config.json"] = json.dumps(tokenizer_config, indent=2) + "\n"
    return texts
