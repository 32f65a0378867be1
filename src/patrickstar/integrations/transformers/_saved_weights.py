"""Weights in the formats of transformers and PEFT: saved from an engine, and read one at a time."""

import copy
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_peft_available

from patrickstar._engine.engine import Engine
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.errors import ModelError
from patrickstar.integrations._weight_files import save_weights
from patrickstar.integrations.transformers._key_mapping import names_of_each
from patrickstar.integrations.transformers._model_folder import Source, TensorInFile, read_header, tensors_of

ADAPTER_FILE = "adapter_model.safetensors"


class SavedWeights(Mapping[str, torch.Tensor]):
    """Mapping from names to tensors that reads a tensor on access."""

    def __init__(self, locations: Mapping[str, TensorInFile]) -> None:
        self.locations = locations

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.locations[name]
        return Source((stored,), stored.shape).read(0, stored.numel).view(stored.shape)

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
        if getattr(model, "peft_config")[adapter].is_prompt_learning:  # noqa: B009
            keys[adapter] = _prompt_names(names, adapter)
            continue
        picked = get_peft_model_state_dict(model, state_dict=dict(numbers), adapter_name=adapter)
        keys[adapter] = {key: names[int(number)] for key, number in picked.items()}
    return keys


def _prompt_names(names: Collection[str], adapter: str) -> dict[str, str]:
    """Return the model's name of each key of a prompt's file: PEFT reads the prompt into the encoder's embedding."""
    keys = {"prompt_embeddings": "embedding.weight", "prefix_task_cols": "prefix_task_cols"}
    keys |= {"prefix_task_rows": "prefix_task_rows"}
    found = {key: f"prompt_encoder.{adapter}.{name}" for key, name in keys.items()}
    return {key: name for key, name in found.items() if name in names}


@contextmanager
def _unmanaged_prompts(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the model have prompt encoders with the values of `state`: PEFT saves what their forward returns."""
    managed = getattr(model, "prompt_encoder", nn.ModuleDict())
    encoders = dict(managed.items())
    for adapter, encoder in encoders.items():
        prefix = f"prompt_encoder.{adapter}."
        values = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        managed[adapter] = copy.deepcopy(encoder)
        managed[adapter].load_state_dict(values, assign=True)
    try:
        yield
    finally:
        managed.update(encoders)


def make_savable(engine: Engine) -> None:
    """Replace the model's `save_pretrained`, which would read the storage of parameters without fetching chunks."""
    model: Any = engine.module
    original = getattr(model, "save_pretrained", None)
    if original is None:
        return

    # A weak reference: the engine closes with its last user, and the model remains usable without it.
    engine_ref = weakref.ref(engine)

    def save_pretrained(save_directory: Any, **options: Any) -> Any:
        active = engine_ref() if any(managed_param_of(param) is not None for param in model.parameters()) else None
        if active is None or "state_dict" in options:
            return original(save_directory, **options)
        if is_adapted(model):
            saved = {name for names in adapter_names(model).values() for name in names.values()}
            saved |= {name for name in model.state_dict(keep_vars=True) if name.startswith("prompt_encoder.")}
            state = active.state_dict(saved)
            with _unmanaged_prompts(model, state):
                return original(save_directory, state_dict=state, **options)
        if options:
            return original(save_directory, state_dict=active.state_dict(), **options)
        return save_weights(active, Path(save_directory))

    model.save_pretrained = save_pretrained
