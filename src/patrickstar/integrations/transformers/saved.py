"""Weights that a Trainer has saved, by the model's names, read one at a time."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, is_peft_available

from patrickstar.errors import TrainingError

ADAPTER_FILE = "adapter_model.safetensors"


class Saved(Mapping[str, torch.Tensor]):
    """Tensors of safetensors files: of each name of the model, in which file it is, and under which key."""

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> torch.Tensor:
        path, key = self.places[name]
        with safe_open(path, framework="pt") as file:
            found: torch.Tensor = file.get_tensor(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has added adapters, so that these are what is saved."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def saved_weights(folder: Path, model: nn.Module) -> Saved:
    """What a checkpoint has of a model: all of it, or its adapters. Raises TrainingError if there are no weights."""
    return Saved(_adapters(folder, model) if is_adapted(model) else _whole(folder, model))


def _whole(folder: Path, model: nn.Module) -> dict[str, tuple[Path, str]]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    places = {}
    for name in names:
        places.update({key: (folder / name, key) for key in _keys(folder / name)})
    # Of tied names one was saved.
    known = {}
    entries = model.state_dict(keep_vars=True)
    for name, tensor in entries.items():
        if name in places:
            known[id(tensor)] = places[name]
    for name, tensor in entries.items():
        if name not in places and id(tensor) in known:
            places[name] = known[id(tensor)]
    return places


def _adapters(folder: Path, model: nn.Module) -> dict[str, tuple[Path, str]]:
    places = {}
    for adapter, names in adapter_names(model).items():
        path = (folder if adapter == "default" else folder / adapter) / ADAPTER_FILE
        keys = set(_keys(path))
        places.update({name: (path, key) for key, name in names.items() if key in keys})
    return places


def adapter_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """Of each adapter the names of what PEFT saves: by the key in its file, the name in the model.

    PEFT is asked by giving it a number in place of each tensor.
    """
    from peft import get_peft_model_state_dict

    adapters: Collection[str] = getattr(model, "peft_config")  # noqa: B009 (nn.Module types it as a tensor)
    every = list(model.state_dict(keep_vars=True))
    numbers = {name: torch.tensor(number) for number, name in enumerate(every)}
    found = {}
    for adapter in adapters:
        picked = get_peft_model_state_dict(model, state_dict=dict(numbers), adapter_name=adapter)
        found[adapter] = {key: every[int(number)] for key, number in picked.items()}
    return found


def _keys(path: Path) -> list[str]:
    if not path.is_file():
        raise TrainingError(f"there are no weights in safetensors at {path}")
    with safe_open(path, framework="pt") as file:
        keys: list[str] = list(file.keys())
    return keys
