"""A local model folder becomes a managed model, each parameter going straight from its file into its chunk."""

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
    """A model from a local folder under management: the engine to call in its place, in training mode, and optimizer.

    folder: holds config.json and safetensors, in one file or in shards. config: budgets and the rest, as for
    `patrickstar.initialize`. model_class: of transformers, an Auto class or a model's own. options: replace fields of
    config.json; `attn_implementation` too. With several processes each reads what it owns, and all have to come here.

    Raises ModelError where the folder and the model don't fit, naming tensors; nothing is ever unpickled, downloaded,
    or run from the folder. Raises what `patrickstar.initialize` does.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ModelError(f"{place} is no folder; give a local one with config.json and safetensors, nothing is fetched")
    model_config = read_config(place / "config.json", **options)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ModelError(f"the weights in {place} are quantized, as its config.json says, and can't be trained")
    with parameters_on_meta():
        model = build_model(model_config, model_class)
    _take_generation_config(model, place)
    return initialize(model, config, FolderWeights(place, model))


def _take_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """How the folder's model generates, which goes with it when it is saved."""
    if model.can_generate() and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{folder / 'generation_config.json'} can't be read: {error}") from error
