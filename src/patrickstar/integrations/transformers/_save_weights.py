"""Save the weights of a managed model in the formats of transformers and PEFT."""

import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import torch

from patrickstar._engine.engine import Engine
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.integrations.transformers._saved_weights import adapter_names, is_adapted

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of transformers' weight files."""


def save_weights(engine: Engine, folder: Path, hidden: str = ".weights") -> None:
    """Save all weights in full precision to a folder that may hold other files. Collective.

    Weights are written to a subfolder first. Raises CheckpointError if it cannot be written.
    """
    staging = folder / hidden
    is_writer = engine.world is None or engine.world.rank == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        if staging.is_dir():
            shutil.rmtree(staging)
    engine.save_pretrained(staging)
    if is_writer:
        for old in folder.iterdir():
            if WEIGHTS.fullmatch(old.name):
                old.unlink()
        for file in staging.iterdir():
            file.replace(folder / file.name)
        staging.rmdir()


def adapter_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the tensors that PEFT saves, in full precision, without reading the rest of the model. Collective."""
    return engine.state_dict({name for names in adapter_names(engine.module).values() for name in names.values()})


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
            return original(save_directory, state_dict=adapter_state(active), **options)
        if options:
            return original(save_directory, state_dict=active.state_dict(), **options)
        return save_weights(active, Path(save_directory))

    model.save_pretrained = save_pretrained
