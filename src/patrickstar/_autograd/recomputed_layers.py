"""Layers of transformers models that are computed again in backward, so that their activations are not stored."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar._autograd.module_hooks import ModuleHooks
from patrickstar._autograd.selective_checkpoint import selective_contexts
from patrickstar.config import Config
from patrickstar.errors import ConfigError

# [Note: recomputed layers]
# A layer that is recomputed in whole stores its input alone, and takes a third more computation. One that stores what
# its products return takes a third of its memory without recomputation, and its norms, activations and sums again. A
# byte for products saves four times the computation of a further byte that stores all. So with a share, each layer
# does the one or the other.
#
# What the last layers store is freed first in backward, before the first layers are recomputed, so that a layer's
# activations at a time come beside those of no other. Hence the first layers are recomputed in whole, as with
# Megatron's `--recompute-method block`.
#
# Modules around the layers have the same switch: if it is on, they store no keys and values in a cache, which layers
# that are recomputed would add to a second time.


class Activations(NamedTuple):
    """Values of the options `activation_checkpointing` and `activation_offload`."""

    activation_checkpointing: float | Literal["products"] | None
    activation_offload: float

    def __str__(self) -> str:
        share, offloaded = self
        layers = "results of products stored" if share == "products" else f"{share or 0:.0%} of the layers recomputed"
        return f"{layers if share else 'all stored'}, {offloaded:.0%} offloaded"


def chosen_activations(config: Config) -> str:
    """Describe the choice that a configuration has in place of "auto"."""
    share = config.activation_checkpointing
    if share == "auto":
        return "nothing chosen yet"
    return str(Activations(share, config.activation_offload))


def find_layers(model: nn.Module, option: str = "activation_checkpointing") -> list[nn.Module]:
    """Return the layers of a model of transformers that can be recomputed, in their order.

    Raises:
        ConfigError: The model has none.
    """
    if not (layers := layers_of(model)):
        raise ConfigError(
            f"{option}: {type(model).__name__} has no layers of transformers that can be recomputed; call "
            f"torch.utils.checkpoint.checkpoint in its forward, and leave the option out"
        )
    return layers


def can_recompute(model: nn.Module) -> bool:
    """Return whether a model has layers that can be recomputed, and none that is by now."""
    layers = layers_of(model)
    return bool(layers) and not any(layer.gradient_checkpointing for layer in layers)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of transformers that can be recomputed, in their order; none of other models."""
    transformers: Any = sys.modules.get("transformers.modeling_layers")
    known = () if transformers is None else transformers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, known)]


def recompute(model: nn.Module, share: float | Literal["products"], hooks: ModuleHooks, *, caches: bool = True) -> None:
    """Recompute the layers of a model until the hooks are removed.

    Args:
        model: Model of transformers.
        share: Share of the layers, the first ones, that are recomputed in whole, rounded to whole layers; the others
            store what their products return, as all do with "products". 0: all activations are stored.
        hooks: Hooks of the engine.
        caches: With share 0 keys and values go to a cache, as in the model itself. False: as with any other share, so
            that gradients have the same bits.
    """
    layers = find_layers(model)
    in_whole = partial(checkpoint, use_reentrant=False)
    selectively = partial(in_whole, context_fn=selective_contexts)
    others = set(layers if share == "products" else layers[round(share * len(layers)) :])
    of_others = selectively if share or caches else _store
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            hooks.replace_attribute(module, "gradient_checkpointing", bool(share) or not caches)
            call = of_others if module in others else in_whole
            hooks.replace_attribute(module, "_gradient_checkpointing_func", call)


def _store(layer: Callable[..., Any], *args: Any) -> Any:
    return layer(*args)
