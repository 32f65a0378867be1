"""Export of a model to a Hugging Face model folder: sharded safetensors and the model's configuration."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from patrickstar._checkpoint.atomic_dir import AtomicDir
from patrickstar._checkpoint.direct_writer import write_error
from patrickstar._checkpoint.safetensors_file import DENSE_ADVICE, DTYPES, SafetensorsFile, TensorEntry
from patrickstar._kernels.rounding import rounded
from patrickstar._layout.byte_size import parse_size
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.state_dict import ModelState
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.errors import CheckpointError, ConfigError, ModelError

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROUNDED_NUMEL = 1 << 20
"""Number of elements that are rounded at once."""

# [Note: export from several processes]
# Rank 0 writes, and all ranks read: parameters are all-gathered one at a time, in the same order on every rank. If
# writing fails, rank 0 still reads the remaining parameters, since the other ranks wait for its shards; the error is
# broadcast afterwards. The folder is renamed only after all ranks report that they read everything: a rank whose disk
# tier failed contributed NaN for the lost data and does not report.


@dataclass(frozen=True)
class ExportItem:
    """Tensor to save: a parameter or a buffer."""

    entry: TensorEntry
    source: ManagedParam | torch.Tensor


class HFExport:
    """Export of one model. Raises ConfigError or ModelError, before anything is read, if it cannot be exported."""

    def __init__(self, state: ModelState, dtype: str | None, max_shard_bytes: int | str) -> None:
        if dtype is not None and dtype not in PRECISIONS:
            names = ", ".join(map(repr, PRECISIONS))
            raise ConfigError(f"dtype={dtype!r} is not supported; use one of {names}, or None")
        _check_no_adapters(state.module)
        _check_own_names(state.module)
        items = _items(state, None if dtype is None else PRECISIONS[dtype])
        self._state = state
        self._items = {item.entry.name: item for item in items}
        self._shards = shards_of([item.entry for item in items], parse_size(max_shard_bytes))
        self._texts = _config_files(state, items)

    def write(self, target: Path) -> CheckpointError | None:
        """Write the folder collectively; return the error, which is the same in all processes.

        On failure no files remain. See [Note: export from several processes].
        """
        world = self._state.shards.world
        items = (self._items[entry.name] for shard in self._shards.values() for entry in shard)
        values = (piece for item in items for piece in _values(self._state, item))
        is_writer = world.rank == 0
        partial, failure = None, None
        try:
            if is_writer:
                try:
                    partial = AtomicDir(target, over_empty=True)
                    write_model_folder(partial.path, self._shards, values, self._texts)
                except CheckpointError as error:
                    failure = error
            if world.size > 1:
                for _ in values:
                    pass
            failure = world.agree_on_error(failure, CheckpointError)
            if partial is not None and failure is None:
                try:
                    partial.rename_into_place()
                    partial = None
                except CheckpointError as error:
                    failure = error
            return world.agree_on_error(failure, CheckpointError)
        finally:
            if partial is not None:
                partial.abandon()


def _items(state: ModelState, dtype: torch.dtype | None) -> list[ExportItem]:
    """Return persistent buffers and parameters, each parameter once, under its first name."""
    items: list[ExportItem] = []
    seen: set[ManagedParam] = set()
    for name, value in state.entries().items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"{name!r} is the extra state of a module; safetensors cannot store it, use state_dict()")
        managed, saved_dtype = managed_param_of(value), value.dtype
        if managed is not None:
            if managed in seen:
                continue
            seen.add(managed)
            saved_dtype = dtype if dtype is not None and managed.full_dtype.is_floating_point else managed.full_dtype
        if saved_dtype not in DTYPES:
            raise ModelError(f"{name!r} has dtype {saved_dtype}, which safetensors cannot store")
        if value.layout is not torch.strided:
            raise ModelError(f"{name!r} has layout {value.layout}, which safetensors cannot store: {DENSE_ADVICE}")
        entry = TensorEntry(name, saved_dtype, tuple(value.shape))
        items.append(ExportItem(entry, managed if managed is not None else value))
    return items


def _check_no_adapters(module: Any) -> None:
    """Raise ModelError for a model with PEFT adapters, whose names transformers' models do not have."""
    if hasattr(module, "peft_config") or getattr(module, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"{type(module).__name__} has PEFT adapters, and a folder with their names would load with every weight "
            f"missing. engine.module.save_pretrained(folder) saves the adapters in full precision; for the merged "
            f"model call engine.close(), merge_and_unload() and save_pretrained(folder)"
        )


def _check_own_names(module: torch.nn.Module) -> None:
    """Raise ModelError for a model with modules whose parameters have names that the class of the model has not."""
    for name, child in module.named_modules():
        if advice := getattr(child, "export_advice", None):
            raise ModelError(
                f"{name!r} is a {type(child).__name__}, whose parameters have names that transformers' own "
                f"{type(module).__name__} would not find in a folder; {advice}"
            )


def common_dtype(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of the dtype that represents all `dtypes`: transformers loads all parameters in one."""
    return str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")


def _config_files(state: ModelState, items: Sequence[ExportItem]) -> dict[str, str]:
    """Return the configuration files of a transformers model as text by file name."""
    texts = {}
    config: Any = getattr(state.module, "config", None)
    generation: Any = getattr(state.module, "generation_config", None)
    if hasattr(config, "to_json_string"):
        fields = json.loads(config.to_json_string())
        fields["architectures"] = [type(state.module).__name__]
        dtypes = [
            item.entry.dtype
            for item in items
            if isinstance(item.source, ManagedParam) and item.entry.dtype.is_floating_point
        ]
        if dtypes:
            fields["dtype"] = common_dtype(dtypes)
        texts["config.json"] = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    return texts


def _values(state: ModelState, item: ExportItem) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order, in pieces, in the saved dtype."""
    if isinstance(item.source, torch.Tensor):
        yield item.source.detach().contiguous()
        return
    for piece in state.pieces(item.source):
        for part in piece.split(_ROUNDED_NUMEL):
            yield rounded(part, item.entry.dtype)


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
