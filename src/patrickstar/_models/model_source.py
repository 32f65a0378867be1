"""Language model to train, causal or with an encoder: a preset, a configuration file or a local model folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from patrickstar._dry_run.simulation import copy_to_meta
from patrickstar._models.model_names import refuse_unknown_model
from patrickstar._models.open_models import find_open_model
from patrickstar._models.presets import TRAINED_PRESETS, Preset, T5Preset
from patrickstar._models.span_corruption import MOST_TOKENS, SENTINELS, SpanCorruption
from patrickstar._models.vocabulary import SMALLEST_VOCABULARY, Vocabulary
from patrickstar.errors import ConfigError, ModelError
from patrickstar.integrations.transformers._folder_weights import FolderWeights
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta, read_config


@dataclass(frozen=True)
class ModelSource:
    """Language model that is not built yet, causal or with an encoder. It is read from ``folder``, if that is set."""

    name: str
    config: PreTrainedConfig
    vocabulary: Vocabulary
    folder: Path | None = None

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence in tokens; None for a model without a limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def open(self) -> tuple[nn.Module | Callable[[], nn.Module], Callable[[str], torch.Tensor] | None]:
        """Return `model` and `weights` for ``patrickstar.initialize``.

        For a folder, the model has its parameters on the meta device; otherwise it is a function that builds it.
        """
        if self.folder is None:
            return self._build, None
        model = self.on_meta()
        return model, FolderWeights(self.folder, model)

    def open_empty(self) -> tuple[nn.Module, Callable[[str], torch.Tensor]]:
        """Return them for a model that a checkpoint fills: no parameter is initialized or read, all are zeros."""
        model = self.on_meta()
        params = dict(model.named_parameters(remove_duplicate=False))
        return model, lambda name: torch.zeros_like(params[name], device="cpu")

    def to_meta(self) -> Callable[[], nn.Module]:
        """Return a function that builds the model on the meta device, without reading its weights."""
        if self.folder is None:
            return self._build
        return partial(copy_to_meta, self.on_meta())

    @property
    def _corruption(self) -> SpanCorruption | None:
        """Task of a model with an encoder; None for a causal one."""
        if not self.config.is_encoder_decoder:
            return None
        return SpanCorruption(self.config.get_text_config().vocab_size, self.vocabulary.end_id or 0)

    def inputs(self, ids: torch.Tensor, *seed: int) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model for a batch of tokens (batch, sequence).

        Args:
            seed: Numbers that together belong to this batch alone; a model with an encoder draws its task from them.
        """
        if (corruption := self._corruption) is None:
            return {"input_ids": ids, "labels": ids}
        return corruption.corrupt(ids, *seed)

    def example(self, batch: int, sequence: int) -> dict[str, torch.Tensor]:
        """Return inputs of the shape of a batch, for dry runs."""
        return self.inputs(torch.zeros(batch, sequence, dtype=torch.int64, device="cpu"), 0)

    def check_sequence(self, sequence: int) -> None:
        """Raise ConfigError if a sequence is longer than the model's positions, or has too many or no spans."""
        if self._corruption is not None and not 2 <= sequence <= MOST_TOKENS:
            raise ConfigError(
                f"the model {self.name} has an encoder, and learns to write spans that are removed from a text, of "
                f"which its vocabulary names {SENTINELS}: use --sequence from 2 to {MOST_TOKENS}"
            )
        if self.max_sequence is not None and sequence > self.max_sequence:
            raise ConfigError(
                f"the model {self.name} has positions for {self.max_sequence} tokens; use --sequence "
                f"{self.max_sequence} or less instead of {sequence}"
            )

    def on_meta(self) -> PreTrainedModel:
        """Return the model with its parameters on the meta device."""
        with parameters_on_meta():
            return self._build()

    def _build(self) -> PreTrainedModel:
        with_encoder = self.config.is_encoder_decoder
        model = build_model(self.config, AutoModelForSeq2SeqLM if with_encoder else AutoModelForCausalLM)
        if model.loss_type is None and not with_encoder:
            # The library's own default, set here because it would warn.
            model.loss_type = "ForCausalLM"
        return model


def find_model(name: str, vocab_size: int | None = None) -> ModelSource:
    """Find a model by name, ``.json`` configuration file, or folder with safetensors.

    Args:
        name: Name of a preset or of a well-known open model, which gets random weights, or path.
        vocab_size: Replaces the vocabulary size of the model; must match the weights of a folder.

    Raises:
        ModelError: The name or configuration is not a language model.
        ConfigError: ``vocab_size`` differs from that of the weights.
    """
    path = Path(name)
    refuse_unknown_model(name)
    preset = TRAINED_PRESETS.get(name) or (None if path.exists() else find_open_model(name))
    if preset is not None:
        config: PreTrainedConfig = preset.config()
    elif path.is_dir():
        config = _language_config(path / "config.json")
    else:
        config = _language_config(path)
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
    return ModelSource(name, config, Vocabulary(_trained_size(config, size)))


def preset_source(name: str, preset: Preset | T5Preset) -> ModelSource:
    """Return the model of a shape, with random weights."""
    config = preset.config()
    config.use_cache = False  # as in find_model
    return ModelSource(name, config, Vocabulary(preset.vocab))


def _language_config(path: Path) -> PreTrainedConfig:
    config = read_config(path)
    models = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in models:
        raise ModelError(f"the model configuration {path} is for {config.model_type}, which is no language model")
    return config


def _trained_size(config: PreTrainedConfig, size: int) -> int:
    """Return the number of tokens of a vocabulary that are trained on the text: all but the sentinels of spans."""
    if not config.is_encoder_decoder:
        return size
    if size < SMALLEST_VOCABULARY + SENTINELS:
        raise ConfigError(
            f"a vocabulary of {size} can't hold the 256 bytes, the end marker and the {SENTINELS} sentinels of a model "
            f"with an encoder; use {SMALLEST_VOCABULARY + SENTINELS} or more"
        )
    return size - SENTINELS


def _folder_vocabulary(folder: Path, config: PreTrainedConfig, size: int) -> Vocabulary:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return Vocabulary(_trained_size(config, size))
    end = config.get_text_config().eos_token_id
    if isinstance(end, list):
        end = end[0] if end else None
    return Vocabulary(size, file, end)
