"""Language models with adapters, without bytes: as peft and bitsandbytes build them from a base in 16 bits."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from patrickstar._dry_run.simulated_hardware import META
from patrickstar._dry_run.simulation import QUANT_STATE
from patrickstar._perf_model.adapters import Adapters
from patrickstar.errors import ConfigError, ModelError

BLOCK_NUMEL = 64
"""Elements that share a constant of 4 bytes: the block size with which transformers loads models in 4 bits."""


def adapted(build: Callable[[], nn.Module], adapters: Adapters, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return a function that builds a model on meta with adapters beside its linear layers but the head.

    Args:
        build: Builds the base on the meta device.
        adapters: Rank, and whether the base is stored in 4 bits.
        dtype: Dtype of the frozen base, or what operators unpack it to. Adapters are in fp32, as peft creates them.

    Raises:
        ConfigError: A package is missing.
    """
    needed = ("peft", "bitsandbytes") if adapters.quantized else ("peft",)
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigError(f"a plan of {adapters} needs {missing[0]}: pip install {missing[0]}")

    def built() -> nn.Module:
        model: Any = build()
        for param in model.parameters():
            param.data = param.data.to(dtype)
        with _quiet():
            # Imported here because it takes seconds to load.
            from peft import LoraConfig, get_peft_model

            if adapters.quantized:
                _quantize(model, dtype)
            config = LoraConfig(r=adapters.rank, target_modules="all-linear", task_type="CAUSAL_LM")
            try:
                model = get_peft_model(model, config)
            except ValueError as error:
                raise ModelError(f"peft can't add adapters: {error}") from error
        model.train()
        module: nn.Module = model
        return module

    return built


def _quantize(model: Any, dtype: torch.dtype) -> None:
    """Replace linear layers by those of 4 bits, as transformers loads them with `BitsAndBytesConfig`."""
    import bitsandbytes
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    modules: Any = bitsandbytes.nn
    quant_state: Any = bitsandbytes.functional.QuantState
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), config)
    for layer in model.modules():
        if isinstance(layer, modules.Linear4bit):
            shape = torch.Size((layer.out_features, layer.in_features))
            packed = torch.empty((shape.numel() + 1) // 2, 1, dtype=torch.uint8, device=META)
            blocks = -(-shape.numel() // BLOCK_NUMEL)
            constants = quant_state(
                absmax=torch.empty(blocks, dtype=torch.float32, device=META),
                shape=shape,
                code=torch.empty(16, dtype=torch.float32, device=META),
                blocksize=BLOCK_NUMEL,
                quant_type="nf4",
                dtype=dtype,
            )
            layer.weight = modules.Params4bit(packed, quant_type="nf4", bnb_quantized=True, module=layer)
            setattr(layer.weight, QUANT_STATE, constants)
            layer.quant_state = constants
            if layer.bias is not None:
                layer.bias.data = layer.bias.data.to(dtype)
    model.is_loaded_in_4bit = True


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out warnings, which come again when the model is built for training."""
    loggers = [logging.getLogger(name) for name in ("peft", "bitsandbytes")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
