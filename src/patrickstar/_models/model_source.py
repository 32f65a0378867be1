"""Causal language model to train: a preset, a configuration file or a local model folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from patrickstar._dry_run.simulation import copy_to_meta
from patrickstar._models.model_names import refuse_unknown_model
from patrickstar._models.open_models import find_open_model
from patrickstar._models.presets import EXPERT_PRESETS, PRESETS, Preset
from patrickstar._models.vocabulary import Vocabulary
from patrickstar.errors import ConfigError, ModelError
from patrickstar.integrations.transformers._folder_weights import FolderWeights
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta, read_config


@dataclass(frozen=True)
class ModelSource:
    """Causal language model that is not built yet. Its parameters are read from ``folder``, if that is set."""

    name: str
    config: PreTrainedConfig
    vocabulary: Vocabulary
    folder: Path | None = None

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence in tokens; None for a model without a limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def open(
        self, activation_checkpointing: bool
    ) -> tuple[nn.Module | Callable[[], nn.Module], Callable[[str], torch.Tensor] | None]:
        """Return `model` and `weights` for ``patrickstar.initialize``.

        For a folder, the model has its parameters on the meta device; otherwise it is a function that builds it.
        """
        if self.folder is None:
            return lambda: self._build(activation_checkpointing), None
        model = self.on_meta(activation_checkpointing)
        return model, FolderWeights(self.folder, model)

    def to_meta(self, activation_checkpointing: bool) -> Callable[[], nn.Module]:
        """Return a function that builds the model on the meta device, without reading its weights."""
        if self.folder is None:
            return lambda: self._build(activation_checkpointing)
        return partial(copy_to_meta, self.on_meta(activation_checkpointing))

    def check_sequence(self, sequence: int) -> None:
        """Raise ConfigError if a sequence is longer than the positions of the model."""
        if self.max_sequence is not None and sequence > self.max_sequence:
            raise ConfigError(
                f"the model {self.name} has positions for {self.max_sequence} tokens; use --sequence "
                f"{self.max_sequence} or less instead of {sequence}"
            )

    def on_meta(self, activation_checkpointing: bool) -> PreTrainedModel:
        """Return the model with its parameters on the meta device."""
        with parameters_on_meta():
            return self._build(activation_checkpointing)

    def _build(self, activation_checkpointing: bool) -> PreTrainedModel:
        model = build_model(self.config, AutoModelForCausalLM)
        if model.loss_type is None:
            # The library's own default, set here because it would warn.
            model.loss_type = "ForCausalLM"
        if activation_checkpointing:
            # Renamed in transformers 5.23.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model


def find_model(name: str, vocab_size: int | None = None) -> ModelSource:
    """Find a model by name, ``.json`` configuration file, or folder with safetensors.

    Args:
        name: Name of a preset or of a well-known open model, which gets random weights, or path.
        vocab_size: Replaces the vocabulary size of the model; must match the weights of a folder.

    Raises:
        ModelError: The name or configuration is not a causal language model.
        ConfigError: ``vocab_size`` differs from that of the weights.
    """
    path = Path(name)
    refuse_unknown_model(name)
    preset = PRESETS.get(name) or EXPERT_PRESETS.get(name) or (None if path.exists() else find_open_model(name))
    if preset is not None:
        config: PreTrainedConfig = preset.config()
    elif path.is_dir():
        config = _causal_config(path / "config.json")
    else:
        config = _causal_config(path)
    # Training reads each token once; a key-value cache would only take memory.
    config.use_cache = False
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise ModelError(f"the configuration of {name} has no vocab_size; is it the configuration of a language model?")
    if preset is None and path.is_dir():
        if vocab_size not in (None, size):
            raise ConfigError(f"the model in {name} has a vocabulary of {size}; leave out --vocab-size {vocab_size}")
        return ModelSource(name, config, _folder_vocabulary(path, config, size), folder=path)
    if vocab_size is not None:
        config.get_text_config().vocab_size = size = vocab_size
    return ModelSource(name, config, Vocabulary(size))


def preset_source(name: str, preset: Preset) -> ModelSource:
    """Return the model of a shape, with random weights."""
    config = preset.config()
    config.use_cache = False  # as in find_model
    return ModelSource(name, config, Vocabulary(preset.vocab))


def _causal_config(path: Path) -> PreTrainedConfig:
    config = read_config(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"the model configuration {path} is for {config.model_type}, which is no causal language model"
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
