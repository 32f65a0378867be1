"""A local model folder: which files of it hold which tensors."""

import json
from pathlib import Path, PurePosixPath

from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._safetensors_reader import TensorInFile, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


def tensors_of(folder: Path) -> dict[str, TensorInFile]:
    """All tensors of a folder, by their names in its files; only headers are read.

    Raises ModelError where there are none, where they are pickles, or where the index and its files don't fit.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return _of_index(index)
    if single.is_file():
        return read_header(single)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run code when they are read; "
            f"convert them to {_SINGLE}"
        )
    raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _of_index(index: Path) -> dict[str, TensorInFile]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = dict(weight_map.items())
        headers = {shard: read_header(_beside(index, shard)) for shard in sorted(set(shards.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"the index {index} can't be read: {error!r}") from error
    placeholder = sorted(key for key, shard in shards.items() if key not in headers[shard])
    if placeholder:
        raise ModelError(f"{index} names tensors that its files don't hold: {listed(placeholder)}")
    surplus = {key: stored for header in headers.values() for key, stored in header.items() if key not in shards}
    return surplus | {key: headers[shard][key] for key, shard in shards.items()}


def _beside(index: Path, shard: str) -> Path:
    """The file that an index names. What the folder links to may lie anywhere; what the index says may not."""
    name = PurePosixPath(shard)
    if name.is_absolute() or ".." in name.parts or "\0" in shard:
        raise ModelError(f"{index} names the file {shard!r}, which is outside of its folder; nothing of it was read")
    file = index.parent / name
    if not file.is_file():
        raise ModelError(f"{index} names the file {shard!r}, which is not there")
    return file


def listed(names: list[str], most: int = 10) -> str:
    """Names for a message: the first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
