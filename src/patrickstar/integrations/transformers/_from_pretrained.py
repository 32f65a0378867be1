"""Load a local model folder into an engine; each parameter is read directly into its chunk."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config
from patrickstar.errors import ModelError
from patrickstar.integrations.transformers._folder_weights import FolderWeights
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta, read_config


def from_pretrained(
    folder: str | Path, config: Config | None = None, *, model_class: Any = AutoModelForCausalLM, **options: Any
) -> tuple[Engine, ChunkOptimizer]:
    """Load a model from a local folder and put it under management.

    Each parameter is read directly into its chunk. Nothing is downloaded, unpickled, or executed from the folder. With
    several processes, all of them must call this function; each process reads the shards that it owns.

    Args:
        folder: Local folder with config.json and safetensors, in one file or in shards.
        config: Memory budgets and other settings, as for `patrickstar.initialize`. Default: `Config()`.
        model_class: Auto class or model class of transformers.
        **options: Replacements for fields of config.json, and `attn_implementation`.

    Returns:
        The engine, to be called in place of the model, in training mode, and its optimizer.

    Raises:
        ModelError: The folder does not match the model; the message names tensors. Also as `patrickstar.initialize`.
        ConfigError: The model's configuration has no such option. Also as `patrickstar.initialize`.
        BudgetError: As `patrickstar.initialize`.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder; pass a local one with config.json and safetensors (no downloads)")
    model_config = read_config(path / "config.json", **options)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ModelError(f"the weights in {path} are quantized, according to its config.json, and can't be trained")
    with parameters_on_meta():
        model = build_model(model_config, model_class)
    _load_generation_config(model, path)
    return initialize(model, config, FolderWeights(path, model))


def _load_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Load generation_config.json, so that it is saved with the model."""
    if model.can_generate() and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{folder / 'generation_config.json'} can't be read: {error}") from error
