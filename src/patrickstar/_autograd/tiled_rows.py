"""MLPs and norms of layers that are computed by tiles of tokens: `Config(tiled_mlp=True)`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar._autograd.recomputed_layers import find_layers
from patrickstar.errors import ConfigError
from patrickstar.functional import tile_rows

# [Note: tiles of rows]
# Each row of the result of an MLP or a norm depends on the same row of its input alone. With 65,536 tokens the MLP of
# Llama 3 8B makes five tensors of 1.9 GB in backward, and its norms four of 1.1 GB in fp32: more than all else that a
# recomputed layer holds. So the module runs tile by tile, each under `torch.utils.checkpoint`: forward stores a tile's
# input, a part of a tensor that is stored anyway, and backward computes one tile at a time.
#
# Order of additions. The gradient of a weight is the sum over tiles, the last one first, as autograd adds the uses of a
# weight: each tile after that rounds the sum once more. Tiles depend on the widest product of a module and on the dtype
# alone. The result is that of the module on all rows wherever a product's kernel computes a row in the same way in a
# matrix of fewer rows.


class TiledRows:
    """Forward of a module whose rows are independent. See [Note: tiles of rows]."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.whole = module, module.forward
        self.width = max(_widths(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(iter((*args, *kwargs.values())))
        rows, shape = tile_rows(self.width, hidden.dtype.itemsize), hidden.shape[:-1]
        if len(args) + len(kwargs) > 1 or shape.numel() <= rows:
            return self.whole(*args, **kwargs)
        tiles = hidden.flatten(0, -2).split(rows)
        return torch.cat([checkpoint(self.whole, each, use_reentrant=False) for each in tiles]).unflatten(0, shape)


def tile(model: nn.Module) -> Iterator[TiledRows]:
    """Yield tiled forwards of the MLPs and norms in the layers of a model, but of those that are tiled by now.

    Raises:
        ConfigError: The model has no layers of transformers, or they have no MLPs.
    """
    modules = {module: None for layer in find_layers(model, "tiled_mlp") for module in layer.modules()}
    if not any(_is_mlp(module) for module in modules):
        raise ConfigError(
            f"tiled_mlp=True: the layers of {type(model).__name__} have no MLPs whose rows are known to be independent"
        )
    for module in modules:
        if (_is_mlp(module) or _is_norm(module)) and not isinstance(module.forward, TiledRows):
            yield TiledRows(module)


def _is_mlp(module: nn.Module) -> bool:
    routed = hasattr(module, "experts") or hasattr(module, "router")  # which also returns what the router decides
    return type(module).__name__.endswith("MLP") and not routed


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _widths(module: nn.Module) -> Iterator[int]:
    """Yield the widths of what a module computes from a row."""
    for each in module.modules():
        for name in ("in_features", "out_features", "nx", "nf"):  # the latter two of GPT-2's layers
            if isinstance(width := getattr(each, name, None), int):
                yield width
    yield from (param.shape[-1] for param in module.parameters() if param.dim() == 1)
    yield 1
