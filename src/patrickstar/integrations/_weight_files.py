"""Weights of an engine as safetensors files in a folder that may hold other files."""

import re
import shutil
from pathlib import Path

from patrickstar._engine.engine import Engine

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of transformers' weight files."""
STAGING = ".weights"
"""Name of the subfolder for files that are being written."""


def save_weights(engine: Engine, folder: Path, max_shard_bytes: int | str = "5GB") -> None:
    """Save all weights in full precision to a folder that may hold other files. Every process must call it.

    Weights are written to a subfolder first.

    Args:
        engine: Engine of the model.
        folder: Folder; weights of an earlier call are replaced.
        max_shard_bytes: Largest file, in bytes or as a size such as "5GB".

    Raises:
        CheckpointError: It cannot be written.
    """
    staging = folder / STAGING
    is_writer = engine.world.rank == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        if staging.is_dir():
            shutil.rmtree(staging)
    engine.save_pretrained(staging, max_shard_bytes=max_shard_bytes)
    if is_writer:
        for old in folder.iterdir():
            if WEIGHTS.fullmatch(old.name):
                old.unlink()
        for file in staging.iterdir():
            file.replace(folder / file.name)
        staging.rmdir()
