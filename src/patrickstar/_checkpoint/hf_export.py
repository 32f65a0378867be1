"""A model folder that other programs load: safetensors in shards, and the model's own configuration."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from patrickstar._checkpoint.atomic_dir import AtomicDir
from patrickstar._checkpoint.safetensors_file import DTYPES, TensorEntry
from patrickstar._checkpoint.sharded_safetensors import PRECISIONS, shards_of, write_model_folder
from patrickstar._kernels.rounding import rounded
from patrickstar._layout.byte_size import parse_size
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.state_dict import ModelState
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.errors import CheckpointError, ConfigError, ModelError

_ROUNDED_NUMEL = 1 << 20
"""Elements that are rounded at once."""

# [Note: several processes write one folder]
# Rank 0 writes, and all read: each parameter is put together from all processes' parts, one at a time, in one order. If
# the disk fails, rank 0 goes on reading, since the others wait for its parts; then they are told. The folder gets its
# name when all have told that they have read all: one whose disk tier failed has given NaN for what it lost, and does
# not come to tell.


@dataclass(frozen=True)
class ExportItem:
    """A tensor to be saved: the value of a parameter, or a buffer."""

    entry: TensorEntry
    held: ManagedParam | torch.Tensor


class HFExport:
    """A model on its way into a folder. Raises ConfigError or ModelError, before anything is read, if it can't be."""

    def __init__(self, state: ModelState, dtype: str | None, max_shard_bytes: int | str) -> None:
        if dtype is not None and dtype not in PRECISIONS:
            names = ", ".join(map(repr, PRECISIONS))
            raise ConfigError(f"dtype {dtype!r} is none to save in; use one of {names}, or None")
        items = _items(state, None if dtype is None else PRECISIONS[dtype])
        self._state = state
        self._held = {item.entry.name: item for item in items}
        self._shards = shards_of([item.entry for item in items], parse_size(max_shard_bytes))
        self._texts = _configurations(state, items)

    def write(self, target: Path) -> CheckpointError | None:
        """Write the folder, which all processes do together; returns what went wrong, of which all know then.

        Nothing is left behind if it did. See [Note: several processes write one folder].
        """
        world = None if self._state.data.comm is None else self._state.data.comm.world
        items = (self._held[entry.name] for shard in self._shards.values() for entry in shard)
        values = (piece for item in items for piece in _values(self._state, item))
        writes = world is None or world.rank == 0
        partial, failed = None, None
        try:
            if writes:
                try:
                    partial = AtomicDir(target, over_empty=True)
                    write_model_folder(partial.path, self._shards, values, self._texts)
                except CheckpointError as error:
                    failed = error
            if world is not None:
                for _ in values:
                    pass
                failed = world.agree_on_error(failed, CheckpointError)
            if partial is not None and failed is None:
                try:
                    partial.rename_into_place()
                    partial = None
                except CheckpointError as error:
                    failed = error
            return failed if world is None else world.agree_on_error(failed, CheckpointError)
        finally:
            if partial is not None:
                partial.abandon()


def _items(state: ModelState, dtype: torch.dtype | None) -> list[ExportItem]:
    """Parameters, each once, under their first names, and persistent buffers."""
    items: list[ExportItem] = []
    seen: set[ManagedParam] = set()
    for name, held in state.entries().items():
        if not isinstance(held, torch.Tensor):
            raise ModelError(f"{name!r} is a module's extra state, which no safetensors file holds; use state_dict()")
        managed, found = managed_param_of(held), held.dtype
        if managed is not None:
            if managed in seen:
                continue
            seen.add(managed)
            found = dtype if dtype is not None and managed.full_dtype.is_floating_point else managed.full_dtype
        if found not in DTYPES:
            raise ModelError(f"{name!r} is of {found}, which no safetensors file holds")
        items.append(ExportItem(TensorEntry(name, found, tuple(held.shape)), managed if managed is not None else held))
    return items


def _configurations(state: ModelState, items: Sequence[ExportItem]) -> dict[str, str]:
    """The model's configuration, if it is one of transformers', and how it generates, as text by file name."""
    texts = {}
    config: Any = getattr(state.module, "config", None)
    generation: Any = getattr(state.module, "generation_config", None)
    if hasattr(config, "to_json_string"):
        fields = json.loads(config.to_json_string())
        fields["architectures"] = [type(state.module).__name__]
        dtypes = [
            one.entry.dtype for one in items if isinstance(one.held, ManagedParam) and one.entry.dtype.is_floating_point
        ]
        if dtypes:
            # Of several the one that holds them all: transformers loads all parameters in it.
            fields["dtype"] = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        texts["config.json"] = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    return texts


def _values(state: ModelState, item: ExportItem) -> Iterator[torch.Tensor]:
    """The elements of a tensor in the order of its shape, in pieces, in the dtype they are saved in."""
    if isinstance(item.held, torch.Tensor):
        yield item.held.detach().contiguous()
        return
    for piece in state.pieces(item.held):
        for part in piece.split(_ROUNDED_NUMEL):
            yield rounded(part, item.entry.dtype)
