"""Folders with a checkpoint of an engine and the rest of Lightning's state."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._engine.engine import Engine
from patrickstar.errors import CheckpointError
from patrickstar.integrations._barrier import barrier

ENGINE_FOLDER = "patrickstar"
"""Subfolder of a checkpoint for the engine's state."""
STATE_FILE = "lightning.ckpt"
"""File of a checkpoint with everything else."""


def save_folder(path: Path, engine: Engine, rest: Mapping[str, Any]) -> None:
    """Save a checkpoint; collective. One that is there is replaced when the new one is complete.

    Args:
        path: Folder.
        engine: Engine, whose state is saved.
        rest: Everything else.

    Raises:
        CheckpointError: The engine's checkpoint can't be written.
    """
    new, previous = path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.previous")
    writes = engine.world.rank == 0
    if writes:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        torch.save(dict(rest), new / STATE_FILE)
    barrier(engine)
    engine.save(new / ENGINE_FOLDER)
    if writes:
        remove(previous)
        if path.exists():
            path.rename(previous)
        new.rename(path)
        remove(previous)
    barrier(engine)


def check_folder(path: Path) -> None:
    """Raise CheckpointError if a folder is not one that `save_folder` has written."""
    if not (path / ENGINE_FOLDER).is_dir() or not (path / STATE_FILE).is_file():
        raise CheckpointError(f"{path} is no checkpoint of this strategy: it lacks {ENGINE_FOLDER} or {STATE_FILE}")


class StoredWeights(Mapping[str, torch.Tensor]):
    """Parameters and buffers of a checkpoint by name, as `module.load_state_dict` takes them.

    A tensor is read on access. A tied parameter has one name here: pass `strict=False`.

    Args:
        path: Folder that `ModelCheckpoint` or `trainer.save_checkpoint` has written.

    Raises:
        CheckpointError: The folder is not a checkpoint, or is damaged.
    """

    prefix = "model."

    def __init__(self, path: str | Path) -> None:
        check_folder(Path(path))
        self._reader = CheckpointReader(Path(path) / ENGINE_FOLDER)
        stored = self._reader.manifest.tensors.items()
        self._names = [
            name.removeprefix(self.prefix) for name, each in stored if name.startswith(self.prefix) and not each.plain
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.tensor(self.prefix + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_weights(path: Path, engine: Engine) -> None:
    """Load the parameters and buffers of a checkpoint into an engine, which keeps its optimizer states.

    Args:
        path: Folder that `save_folder` has written.
        engine: Engine.

    Raises:
        CheckpointError: The checkpoint is damaged, or lacks a parameter.
        ModelError: The checkpoint has a parameter that the model lacks, or one of another shape.
    """
    weights = StoredWeights(path)
    params = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    first = {name for name, _ in engine.module.named_parameters()}
    needed = engine.module.state_dict(keep_vars=True).keys() - (params - first)
    if missing := sorted(needed - weights.keys()):
        raise CheckpointError(
            f"{path} is of another model: it lacks {len(missing)} entries of the state dict, the first is "
            f"{missing[0]!r}"
        )
    engine.load_state_dict(weights, strict=False)


def load_rest(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return what a folder holds beside the engine's state. `weights_only`: as for `torch.load`."""
    rest: dict[str, Any] = torch.load(path / STATE_FILE, weights_only=weights_only)
    return rest


def remove(path: Path) -> None:
    """Remove a checkpoint, a folder or a file, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
