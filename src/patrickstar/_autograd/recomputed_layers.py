"""Layers of transformers models that are computed again in backward, so that their activations are not stored."""

import sys
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar._autograd.module_hooks import ModuleHooks
from patrickstar.errors import ConfigError

# [Note: recomputed layers]
# A layer that is recomputed stores its input alone, and takes a third more computation. Stored activations of the last
# layers are freed first in backward, before the first layers are recomputed, so that a layer's activations at a time
# come beside those of no other. Hence the first layers are recomputed, and the last ones stored, as with Megatron's
# `--recompute-method block`.
#
# Modules around the layers have the same switch: if it is on, they store no keys and values in a cache, which layers
# that are recomputed would add to a second time.


def recomputed_layers(model: nn.Module, share: float) -> list[tuple[nn.Module, bool]]:
    """Return the layers that can be recomputed, in their order, and whether they are.

    Args:
        model: Model of transformers.
        share: Share of the layers, from 0 to 1, rounded to whole ones.

    Raises:
        ConfigError: The model has no such layers.
    """
    if not (layers := _layers(model)):
        raise ConfigError(
            f"activation_checkpointing={share:g}: {type(model).__name__} has no layers of transformers that can be "
            f"recomputed; call torch.utils.checkpoint.checkpoint in its forward, and leave the option out"
        )
    count = round(share * len(layers))
    return [(layer, number < count) for number, layer in enumerate(layers)]


def can_recompute(model: nn.Module) -> bool:
    """Return whether a model has layers that can be recomputed, and none that is by now."""
    layers = _layers(model)
    return bool(layers) and not any(layer.gradient_checkpointing for layer in layers)


def _layers(model: nn.Module) -> list[nn.Module]:
    transformers: Any = sys.modules.get("transformers.modeling_layers")
    known = () if transformers is None else transformers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, known)]


def recompute(model: nn.Module, share: float, hooks: ModuleHooks) -> None:
    """Recompute the first layers of a model and store the activations of the others, until the hooks are removed."""
    layers, call = dict(recomputed_layers(model, share)), partial(checkpoint, use_reentrant=False)
    around = any(layers.values())
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            hooks.replace_attribute(module, "gradient_checkpointing", layers.get(module, around))
            hooks.replace_attribute(module, "_gradient_checkpointing_func", call)
