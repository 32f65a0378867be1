"""The job of ``patrickstar export``: a checkpoint of a run becomes a model folder that other programs load."""

import json
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from patrickstar._checkpoint.atomic_dir import AtomicDir
from patrickstar._checkpoint.metadata import model_tensors
from patrickstar._checkpoint.safetensors_file import TensorEntry
from patrickstar._checkpoint.sharded_safetensors import PRECISIONS, shards_of, write_model_folder
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._cli.resume_options import newest_in
from patrickstar._cli.run_metadata import About
from patrickstar._cli.tokenizer import END
from patrickstar._kernels.rounding import rounded
from patrickstar._layout.byte_size import format_size, parse_size


def export(
    checkpoint: Path, folder: Path, dtype: Literal["bf16", "fp16", "fp32"], max_shard: str, console: Console
) -> None:
    """Write a model folder from a checkpoint, or the newest of a folder of them, a tensor at a time.

    Raises CheckpointError if it is none of ``patrickstar train``, is damaged, or the folder can't be written.
    """
    reader = CheckpointReader(newest_in(checkpoint))
    about = About.read(reader)
    names = model_tensors(reader)
    wanted = PRECISIONS[dtype]
    entries = [_entry(reader, name, wanted if is_parameter else None) for name, is_parameter in names.items()]
    shards = shards_of(entries, parse_size(max_shard))
    partial = AtomicDir(folder, over_empty=True)
    try:
        values = (
            rounded(reader.tensor(f"model.{entry.name}"), entry.dtype) for shard in shards.values() for entry in shard
        )
        write_model_folder(partial.path, shards, values, _texts(about, wanted))
        partial.rename_into_place()
    except BaseException:
        partial.abandon()
        raise
    nbytes = sum(entry.nbytes for entry in entries)
    console.print(
        f"{folder}: {len(entries)} tensors, {format_size(nbytes)} in {dtype}, from {reader.folder}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _entry(reader: CheckpointReader, name: str, dtype: torch.dtype | None) -> TensorEntry:
    told = reader.manifest.tensors[f"model.{name}"]
    own: torch.dtype = getattr(torch, told.dtype)
    return TensorEntry(name, dtype if dtype is not None and own.is_floating_point else own, tuple(told.shape))


def _texts(about: About, dtype: torch.dtype) -> dict[str, str]:
    """The configuration, as the model library writes it, and the tokenizer."""
    fields = json.loads(about.config)
    fields |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": True, "architectures": [about.architecture]}
    texts = {"config.json": json.dumps(fields, indent=2, sort_keys=True) + "\n", "tokenizer.json": about.tokenizer}
    if about.trained:
        told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        texts["tokenizer_config.json"] = json.dumps(told, indent=2) + "\n"
    return texts
