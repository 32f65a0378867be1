"""A model folder that other programs load: safetensors in shards, and the model's own configuration."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.folder import Partial
from patrickstar.checkpoint.page_file import cant_write
from patrickstar.checkpoint.safetensors import DTYPES, Entry, SafetensorsFile
from patrickstar.engine.parameters import slot_of
from patrickstar.engine.slot import Slot
from patrickstar.engine.state import ModelState
from patrickstar.errors import CheckpointError, ConfigError, ModelError
from patrickstar.kernels.rounding import round_into
from patrickstar.layout.sizes import parse_size
from patrickstar.parallel.world import World

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROUNDED_NUMEL = 1 << 20
"""Elements that are rounded at once."""

# [Note: several processes write one folder]
# Rank 0 writes, and all read: each parameter is put together from all processes' parts, one at a time, in one order. If
# the disk fails, rank 0 goes on reading, since the others wait for its parts; then they are told. The folder gets its
# name when all have told that they have read all: one whose disk tier failed has given NaN for what it lost, and does
# not come to tell.


@dataclass(frozen=True)
class Item:
    """A tensor to be saved: the value of a parameter, or a buffer."""

    entry: Entry
    held: Slot | torch.Tensor


class Export:
    """A model on its way into a folder. Raises ConfigError or ModelError, before anything is read, if it can't be."""

    def __init__(self, state: ModelState, dtype: str | None, max_shard_bytes: int | str) -> None:
        if dtype is not None and dtype not in _PRECISIONS:
            names = ", ".join(map(repr, _PRECISIONS))
            raise ConfigError(f"dtype {dtype!r} is none to save in; use one of {names}, or None")
        items = _items(state, None if dtype is None else _PRECISIONS[dtype])
        self._state = state
        self._shards = _shards(items, parse_size(max_shard_bytes))
        self._texts = _configurations(state, items)

    def write(self, target: Path) -> CheckpointError | None:
        """Write the folder, which all processes do together; returns what went wrong, of which all know then.

        Nothing is left behind if it did. See [Note: several processes write one folder].
        """
        world = None if self._state.data.peers is None else self._state.data.peers.world
        values = (piece for shard in self._shards.values() for item in shard for piece in _values(self._state, item))
        writes = world is None or world.rank == 0
        partial, failed = None, None
        try:
            if writes:
                try:
                    partial = Partial(target, over_empty=True)
                    _write(partial.path, self._shards, values, self._texts)
                except CheckpointError as error:
                    failed = error
            if world is not None:
                for _ in values:
                    pass
                failed = _first_told(world, failed)
            if partial is not None and failed is None:
                try:
                    partial.appear()
                    partial = None
                except CheckpointError as error:
                    failed = error
            return failed if world is None else _first_told(world, failed)
        finally:
            if partial is not None:
                partial.abandon()


def _items(state: ModelState, dtype: torch.dtype | None) -> list[Item]:
    """Parameters, each once, under their first names, and persistent buffers."""
    items: list[Item] = []
    seen: set[Slot] = set()
    for name, held in state.entries().items():
        if not isinstance(held, torch.Tensor):
            raise ModelError(f"{name!r} is a module's extra state, which no safetensors file holds; use state_dict()")
        slot, found = slot_of(held), held.dtype
        if slot is not None:
            if slot in seen:
                continue
            seen.add(slot)
            found = dtype if dtype is not None and slot.full_dtype.is_floating_point else slot.full_dtype
        if found not in DTYPES:
            raise ModelError(f"{name!r} is of {found}, which no safetensors file holds")
        items.append(Item(Entry(name, found, tuple(held.shape)), slot if slot is not None else held))
    return items


def _shards(items: Sequence[Item], max_bytes: int) -> dict[str, list[Item]]:
    """Files by their names, each of at most so many bytes, or of one tensor."""
    shards: list[list[Item]] = [[]]
    taken = 0
    for item in items:
        if shards[-1] and taken + item.entry.nbytes > max_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(item)
        taken += item.entry.nbytes
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    # Wide numbers first: then each lies at a multiple of its size.
    ordered = [sorted(shard, key=lambda item: -item.entry.dtype.itemsize) for shard in shards]
    return dict(zip(names if count > 1 else ["model.safetensors"], ordered, strict=True))


def _configurations(state: ModelState, items: Sequence[Item]) -> dict[str, str]:
    """The model's configuration, if it is one of transformers', and how it generates, as text by file name."""
    texts = {}
    config: Any = getattr(state.module, "config", None)
    generation: Any = getattr(state.module, "generation_config", None)
    if hasattr(config, "to_json_string"):
        fields = json.loads(config.to_json_string())
        fields["architectures"] = [type(state.module).__name__]
        dtypes = [one.entry.dtype for one in items if isinstance(one.held, Slot) and one.entry.dtype.is_floating_point]
        if dtypes:
            # Of several the one that holds them all: transformers loads all parameters in it.
            fields["dtype"] = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        texts["config.json"] = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    return texts


def _values(state: ModelState, item: Item) -> Iterator[torch.Tensor]:
    """The elements of a tensor in the order of its shape, in pieces, in the dtype they are saved in."""
    if isinstance(item.held, torch.Tensor):
        yield item.held.detach().contiguous()
        return
    for piece in state.pieces(item.held):
        for part in piece.split(_ROUNDED_NUMEL):
            if part.dtype is item.entry.dtype:
                yield part
            else:
                rounded = torch.empty_like(part, dtype=item.entry.dtype)
                round_into(rounded, part)
                yield rounded


def _write(
    folder: Path, shards: Mapping[str, Sequence[Item]], values: Iterator[torch.Tensor], texts: Mapping[str, str]
) -> None:
    for name, shard in shards.items():
        file = SafetensorsFile(folder / name, [item.entry for item in shard], {"format": "pt"})
        try:
            left = sum(item.entry.nbytes for item in shard)
            while left:
                piece = next(values)
                file.write(piece)
                left -= piece.nbytes
            file.close()
        except BaseException:
            file.abandon()
            raise
    if len(shards) > 1:
        entries = [(item.entry, name) for name, shard in shards.items() for item in shard]
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry, _ in entries)},
            "weight_map": {entry.name: name for entry, name in sorted(entries, key=lambda one: one[0].name)},
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
        raise cant_write(path, error, len(data)) from error


def _first_told(world: World, own: CheckpointError | None) -> CheckpointError | None:
    """What went wrong in any process, as all are told."""
    told = [text for text in world.tell("" if own is None else str(own)) if text]
    return own if own is not None or not told else CheckpointError(told[0])
