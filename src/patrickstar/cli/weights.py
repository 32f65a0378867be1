"""The tensors of a model folder, read one at a time from its safetensors files."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from patrickstar.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class FolderWeights:
    """Reads a model's parameters by their names in the model; nothing stays in memory between two reads.

    A parameter is looked for under all its names (tied weights have several, and files may hold any one of them), with
    and without ``base_prefix``, which files written from the model without its head lack. Raises ModelError, naming
    the parameter or the file, where one is missing, of another shape or unreadable.
    """

    def __init__(self, folder: Path, model: nn.Module, base_prefix: str) -> None:
        self._folder = folder
        files = _files_by_name(folder)
        self._sources: dict[str, tuple[str, Path]] = {}
        missing = []
        for names in _names_of_each(model.named_parameters(remove_duplicate=False)):
            source = _find(names, base_prefix, files)
            if source is None:
                missing.append(names[0])
            else:
                self._sources.update(dict.fromkeys(names, source))
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(
                f"{folder} has no tensor for the parameter {missing[0]}{others}; "
                "its safetensors files and its config.json are not of the same model"
            )
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, buffer in model.named_buffers():
            source = _find([name], base_prefix, files)
            if source is not None:
                buffer.copy_(self._read(name, source, tuple(buffer.shape)))

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor of one parameter, in the dtype of the file."""
        return self._read(name, self._sources[name], self._shapes.get(name))

    def _read(self, name: str, source: tuple[str, Path], shape: tuple[int, ...] | None) -> torch.Tensor:
        key, file = source
        # Opened for one tensor and closed again: a mapping that stays open keeps the pages that were read in memory.
        with _open(file) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(key)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ModelError(
                f"{file} holds {key} with shape {tuple(tensor.shape)}, and the model's {name} has {shape}; "
                "the file and the folder's config.json are not of the same model"
            )
        return tensor


def _names_of_each(named: Iterator[tuple[str, nn.Parameter]]) -> Iterable[list[str]]:
    """All names of each parameter, the first one first."""
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    return names.values()


def _find(names: list[str], base_prefix: str, files: dict[str, Path]) -> tuple[str, Path] | None:
    prefix = f"{base_prefix}."
    for name in names:
        for key in (name, name.removeprefix(prefix), prefix + name):
            if key in files:
                return key, files[key]
    return None


def _files_by_name(folder: Path) -> dict[str, Path]:
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return _read_index(index)
    if single.is_file():
        with _open(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if any(folder.glob("*.bin")):
        raise ModelError(
            f"{folder} holds its weights as pickles (.bin), which can run code when they are read; "
            f"convert them to {_SINGLE}"
        )
    raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / shard for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the index {index} can't be read: {error!r}") from error
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise ModelError(f"{index} names the file {file.name}, which is not there")
    return files


def _open(file: Path) -> Any:  # the library's own type is a builtin without annotations
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
