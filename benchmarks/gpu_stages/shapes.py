"""Models by name, built on the meta device, and initial values for their parameters."""

import math
from functools import cache
from typing import Any

import torch
from steps import checkpointed, gpt
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from patrickstar.integrations.transformers._model_builder import parameters_on_meta

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(SIZES, (2, 64, 128, 4, 2), strict=True)) | {"vocab_size": 256},
    "3b": dict(zip(SIZES, (28, 3072, 8192, 24, 8), strict=True)) | {"vocab_size": 128256, "tie_word_embeddings": True},
    "8b": dict(zip(SIZES, (32, 4096, 14336, 32, 8), strict=True)) | {"vocab_size": 128256},
}
"""Shapes of Llama 3.2 3B, Llama 3.1 8B and a tiny model. Other names are presets of the command line."""

PATTERN_NUMEL = 1 << 20


def build(name: str, checkpointing: bool) -> nn.Module:
    """Build a causal language model in training mode."""
    if name not in LLAMAS:
        return gpt(name, checkpointing)
    config = LlamaConfig(**LLAMAS[name], max_position_embeddings=8192, bos_token_id=0, eos_token_id=0, use_cache=False)
    model = LlamaForCausalLM(config).train()
    return checkpointed(model) if checkpointing else model


def build_on_meta(name: str, checkpointing: bool) -> nn.Module:
    """Build a model with parameters on the meta device and real buffers."""
    with parameters_on_meta():
        return build(name, checkpointing)


def pattern(model: nn.Module, name: str) -> torch.Tensor:
    """Return initial values: norms 1, biases 0, matrices repeated normal numbers.

    Drawing billions of random numbers would take minutes.
    """
    param = model.get_parameter(name)
    if param.dim() < 2:
        return torch.full(param.shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
    times = math.ceil(param.numel() / PATTERN_NUMEL)
    return _numbers().repeat(times)[: param.numel()].view(param.shape)


@cache
def _numbers() -> torch.Tensor:
    return 0.02 * torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(0))


def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Fill a model on the meta device with the values of `pattern`, in fp32."""
    seen: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in seen:
                value = pattern(model, f"{prefix}.{name}" if prefix else name).to(device)
                seen[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, seen[id(param)])
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    return model
