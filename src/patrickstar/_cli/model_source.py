"""The causal language model to train: a preset, a configuration file or a local model folder."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from patrickstar._cli.presets import PRESETS
from patrickstar._cli.tokenizer import Vocabulary
from patrickstar.errors import ConfigError, ModelError
from patrickstar.integrations.transformers._folder_weights import FolderWeights
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta, read_config


@dataclass(frozen=True)
class ModelSource:
    """A causal language model that is yet to be built; with a ``folder``, its parameters' values come from there."""

    name: str
    config: PreTrainedConfig
    vocabulary: Vocabulary
    folder: Path | None = None

    @property
    def max_sequence(self) -> int | None:
        """The most tokens a sample may have, None for a model without a limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def open(
        self, activation_checkpointing: bool
    ) -> tuple[nn.Module | Callable[[], nn.Module], Callable[[str], torch.Tensor] | None]:
        """What ``patrickstar.initialize`` takes: a function that builds the model; or for a folder the model with its
        parameters on the meta device, and a callable that reads the tensor of a parameter by its name.
        """
        if self.folder is None:
            return lambda: self._build(activation_checkpointing), None
        with parameters_on_meta():
            model = self._build(activation_checkpointing)
        return model, FolderWeights(self.folder, model)

    def _build(self, activation_checkpointing: bool) -> PreTrainedModel:
        model = build_model(self.config, AutoModelForCausalLM)
        if model.loss_type is None:
            # What the library takes by itself where it finds no name, but not without a warning.
            model.loss_type = "ForCausalLM"
        if activation_checkpointing:
            # Its name before transformers 5.23.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model


def find_model(place: str, vocab_size: int | None = None) -> ModelSource:
    """The model that ``place`` means: a preset's name, a ``.json`` configuration file, or a folder with safetensors.

    ``vocab_size`` replaces the model's own; a folder's weights fix it. Raises ModelError for a place or a configuration
    that is no causal language model, ConfigError for a ``vocab_size`` that the weights don't have.
    """
    path = Path(place)
    if place in PRESETS:
        config: PreTrainedConfig = PRESETS[place].config()
    elif path.is_dir():
        config = _causal_config(path / "config.json")
    elif path.is_file():
        config = _causal_config(path)
    else:
        raise ModelError(_unknown(place))
    # Training reads each token once: there is nothing to keep for the next one.
    config.use_cache = False
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise ModelError(f"the configuration of {place} has no vocab_size; is it a language model's?")
    if place not in PRESETS and path.is_dir():
        if vocab_size not in (None, size):
            raise ConfigError(f"the model in {place} has a vocabulary of {size}; leave out --vocab-size {vocab_size}")
        return ModelSource(place, config, _folder_vocabulary(path, config, size), folder=path)
    if vocab_size is not None:
        config.get_text_config().vocab_size = size = vocab_size
    return ModelSource(place, config, Vocabulary(size))


def _unknown(place: str) -> str:
    near = get_close_matches(place, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the presets are {', '.join(PRESETS)}"
    return f"there is no model {place!r}: it is neither a preset's name, nor a config file, nor a model folder; {hint}"


def _causal_config(path: Path) -> PreTrainedConfig:
    config = read_config(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"the model configuration {path} is of a {config.model_type}, which is no causal language model"
        )
    return config


def _folder_vocabulary(folder: Path, config: PreTrainedConfig, size: int) -> Vocabulary:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return Vocabulary(size)
    end = config.get_text_config().eos_token_id
    if isinstance(end, list):
        end = end[0] if end else None
    return Vocabulary(size, file, end)
