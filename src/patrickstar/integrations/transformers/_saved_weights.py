"""Weights of a Trainer checkpoint, by the model's names, read one at a time."""

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


class SavedWeights(Mapping[str, torch.Tensor]):
    """Mapping from names to tensors that reads a tensor on access."""

    def __init__(self, locations: Mapping[str, TensorInFile]) -> None:
        self.locations = locations

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.locations[name]
        values = torch.empty(stored.numel, dtype=DTYPES[stored.dtype], device="cpu")
        stored.read_into(values, 0)
        return values.view(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def __len__(self) -> int:
        return len(self.locations)


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has PEFT adapters; then only these are saved."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def saved_weights(folder: Path, model: nn.Module) -> SavedWeights:
    """Return a checkpoint's weights: the whole model or its adapters. Raises ModelError if there are none."""
    return SavedWeights(_adapters(folder, model) if is_adapted(model) else _whole(folder, model))


def _whole(folder: Path, model: nn.Module) -> dict[str, TensorInFile]:
    locations = tensors_of(folder)
    for names in names_of_each(model):
        # A tied parameter was saved under one of its names.
        stored = next((locations[name] for name in names if name in locations), None)
        if stored is not None:
            locations.update({name: stored for name in names if name not in locations})
    return locations


def _adapters(folder: Path, model: nn.Module) -> dict[str, TensorInFile]:
    locations = {}
    for adapter, names in adapter_names(model).items():
        path = (folder if adapter == "default" else folder / adapter) / ADAPTER_FILE
        if not path.is_file():
            raise ModelError(f"{path}, the PEFT file of the adapter {adapter!r}, does not exist")
        stored = read_header(path)
        if missing := sorted(names.keys() - stored.keys()):
            raise ModelError(f"{path} lacks {', '.join(missing)} of the adapter {adapter!r}")
        locations.update({name: stored[key] for key, name in names.items()})
    return locations


def adapter_names(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return, per adapter, the model's name of each key in the adapter's file.

    Calls PEFT with numbered scalars in place of tensors to find out which key holds which tensor.
    """
    from peft import get_peft_model_state_dict

    adapters: Collection[str] = getattr(model, "peft_config")  # noqa: B009 (nn.Module types it as a tensor)
    names = list(model.state_dict(keep_vars=True))
    numbers = {name: torch.tensor(number, device="cpu") for number, name in enumerate(names)}
    keys = {}
    for adapter in adapters:
        picked = get_peft_model_state_dict(model, state_dict=dict(numbers), adapter_name=adapter)
        keys[adapter] = {key: names[int(number)] for key, number in picked.items()}
    return keys
