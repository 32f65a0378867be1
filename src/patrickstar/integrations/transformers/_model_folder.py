"""Tensors of a local model folder and the files that hold them."""

import json
from pathlib import Path, PurePosixPath

from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._safetensors_reader import TensorInFile, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


def tensors_of(folder: Path) -> dict[str, TensorInFile]:
    """Return all tensors of a folder by their names in its files; read only headers.

    Raises ModelError if there are none, if they are pickles, or if the index and its files do not match.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return _of_index(index)
    if single.is_file():
        return read_header(single)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run code when they are loaded; "
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
    missing = sorted(key for key, shard in shards.items() if key not in headers[shard])
    if missing:
        raise ModelError(f"{index} names tensors that its files don't hold: {listed(missing)}")
    unlisted = {key: stored for header in headers.values() for key, stored in header.items() if key not in shards}
    return unlisted | {key: headers[shard][key] for key, shard in shards.items()}


def _beside(index: Path, shard: str) -> Path:
    """Return the file that an index names. Symbolic links may leave the folder; names in the index may not."""
    name = PurePosixPath(shard)
    if name.is_absolute() or ".." in name.parts or "\0" in shard:
        raise ModelError(f"{index} names the file {shard!r}, which is outside of its folder; it was not read")
    file = index.parent / name
    if not file.is_file():
        raise ModelError(f"{index} names the file {shard!r}, which does not exist")
    return file


def listed(names: list[str], limit: int = 10) -> str:
    """Format names for a message: the first ones, and the number of the rest."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
