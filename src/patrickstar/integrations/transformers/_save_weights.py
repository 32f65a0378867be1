"""Weights of a managed model as transformers and PEFT save them."""

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
"""The files that transformers saves weights in."""


def save_weights(engine: Engine, folder: Path, hidden: str = ".weights") -> None:
    """All weights in full precision, one at a time, into a folder that may hold other things; all processes come.

    They are written to a folder within it first. Raises CheckpointError where that can't be written.
    """
    fresh = folder / hidden
    writes = engine.world is None or engine.world.rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        if fresh.is_dir():
            shutil.rmtree(fresh)
    engine.save_pretrained(fresh)
    if writes:
        for old in folder.iterdir():
            if WEIGHTS.fullmatch(old.name):
                old.unlink()
        for file in fresh.iterdir():
            file.replace(folder / file.name)
        fresh.rmdir()


def adapter_state(engine: Engine) -> dict[str, torch.Tensor]:
    """What PEFT saves of a model, in full precision, without a look at the rest of it; all processes come."""
    return engine.state_dict({name for names in adapter_names(engine.module).values() for name in names.values()})


def make_savable(engine: Engine) -> None:
    """Have the model's own `save_pretrained` find the parameters, which it reads past all that they announce."""
    model: Any = engine.module
    plain = getattr(model, "save_pretrained", None)
    if plain is None:
        return

    # The engine ends with its last user, and the model lives on as an ordinary one.
    held = weakref.ref(engine)

    def save_pretrained(save_directory: Any, **options: Any) -> Any:
        managing = held() if any(managed_param_of(param) is not None for param in model.parameters()) else None
        if managing is None or "state_dict" in options:
            return plain(save_directory, **options)
        if is_adapted(model):
            return plain(save_directory, state_dict=adapter_state(managing), **options)
        if options:
            return plain(save_directory, state_dict=managing.state_dict(), **options)
        return save_weights(managing, Path(save_directory))

    model.save_pretrained = save_pretrained
