"""Weights that a Trainer has saved, by the model's names, read one at a time."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers.utils.import_utils import is_peft_available

from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._key_mapping import names_of_each
from patrickstar.integrations.transformers._model_folder import tensors_of
from patrickstar.integrations.transformers._safetensors_reader import DTYPES, TensorInFile, read_header

ADAPTER_FILE = "adapter_model.safetensors"


class Saved(Mapping[str, torch.Tensor]):
    """Values by name, which lie in files until they are asked for."""

    def __init__(self, locations: Mapping[str, TensorInFile]) -> None:
        self.locations = locations

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.locations[name]
        found = torch.empty(place.numel, dtype=DTYPES[place.dtype], device="cpu")
        place.read_into(found, 0)
        return found.view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def __len__(self) -> int:
        return len(self.locations)


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has added adapters, so that these are what is saved."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def saved_weights(folder: Path, model: nn.Module) -> Saved:
    """What a checkpoint has of a model: all of it, or its adapters. Raises ModelError if there are no weights."""
    return Saved(_adapters(folder, model) if is_adapted(model) else _whole(folder, model))


def _whole(folder: Path, model: nn.Module) -> dict[str, TensorInFile]:
    locations = tensors_of(folder)
    for names in names_of_each(model):
        # Of tied names one was saved.
        found = next((locations[name] for name in names if name in locations), None)
        if found is not None:
            locations.update({name: found for name in names if name not in locations})
    return locations


def _adapters(folder: Path, model: nn.Module) -> dict[str, TensorInFile]:
    locations = {}
    for adapter, names in adapter_names(model).items():
        path = (folder if adapter == "default" else folder / adapter) / ADAPTER_FILE
        if not path.is_file():
            raise ModelError(f"there is no {path}, where PEFT saves the adapter {adapter!r}")
        stored = read_header(path)
        if missing := sorted(names.keys() - stored.keys()):
            raise ModelError(f"{path} lacks {', '.join(missing)}, which the adapter {adapter!r} has here")
        locations.update({name: stored[key] for key, name in names.items()})
    return locations


def adapter_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """Of each adapter the names of what PEFT saves: by the key in its file, the name in the model.

    PEFT is asked by giving it a number in place of each tensor.
    """
    from peft import get_peft_model_state_dict

    adapters: Collection[str] = getattr(model, "peft_config")  # noqa: B009 (nn.Module types it as a tensor)
    every = list(model.state_dict(keep_vars=True))
    numbers = {name: torch.tensor(number, device="cpu") for number, name in enumerate(every)}
    found = {}
    for adapter in adapters:
        picked = get_peft_model_state_dict(model, state_dict=dict(numbers), adapter_name=adapter)
        found[adapter] = {key: every[int(number)] for key, number in picked.items()}
    return found
