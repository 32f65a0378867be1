"""Construction of transformers models from their configuration, optionally with parameters on meta."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from patrickstar.errors import ConfigError, ModelError


def read_config(path: Path, **options: Any) -> PreTrainedConfig:
    """Read a model configuration from a JSON file; `options` replace its fields.

    Raises ModelError for an invalid file, ConfigError for unknown options.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the model configuration {path} can't be read: {error}") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(f"the model configuration {path} has the model_type {model_type!r}, which is unknown")
    config: PreTrainedConfig
    try:
        config, unused = CONFIG_MAPPING[model_type].from_dict(fields, return_unused_kwargs=True, **options)
    except Exception as error:  # each configuration class raises its own types
        raise ModelError(f"the model configuration {path} is not valid: {error}") from error
    if unused:
        raise ConfigError(f"the model configuration {path} of a {model_type} has no option {', '.join(sorted(unused))}")
    return config


def build_model(config: PreTrainedConfig, model_class: Any) -> PreTrainedModel:
    """Build a model in fp32 and in training mode with its own class or an Auto class of transformers.

    Raises ModelError if class and configuration do not match. Never executes code from the folder.
    """
    try:
        if hasattr(model_class, "from_config"):
            model: PreTrainedModel = model_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
        elif issubclass(model_class, PreTrainedModel) and isinstance(config, model_class.config_class or ()):
            model = model_class._from_config(config, dtype=torch.float32)
        else:
            raise ValueError(f"the class does not accept a {type(config).__name__}")
    except (ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{model_class.__name__} can't build a {config.model_type}: {reason}") from error
    model.tie_weights()
    model.train()
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create the parameters of modules on the meta device; buffers, which hold computed values, stay real."""
    # Maps each parameter to one meta parameter, so that a parameter registered twice stays shared.
    replaced = WeakTensorKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        meta: nn.Parameter = replaced[parameter]
        return meta

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return a parameter
    try:
        yield
    finally:
        handle.remove()
