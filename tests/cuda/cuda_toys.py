"""Small models, and what is trained on them."""

import pytest
import torch
from torch import nn

WIDTH = 256


def layers(width: int = WIDTH, count: int = 8, dropout: float = 0.0):
    """A function that builds linear layers with GELUs between them."""

    def build() -> nn.Module:
        blocks = ((nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(count))
        return nn.Sequential(*(layer for block in blocks for layer in block))

    return build


def gpt(checkpointing: bool):
    """A function that builds a GPT-2 of three layers."""
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        shape = dict(n_layer=3, n_embd=64, n_head=4, vocab_size=128, use_cache=False, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
        if checkpointing:
            # Renamed in transformers 5.23.
            name = "activation_checkpointing_enable"
            getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model

    return build


def inputs(count: int, width: int = WIDTH, rows: int = 32, seed: int = 1) -> list[torch.Tensor]:
    """Random vectors on the host."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(rows, width, generator=generator, device="cpu") for _ in range(count)]


def train(trainer, values: list[torch.Tensor], **options) -> list[torch.Tensor]:
    """The usual loop. Returns the losses, on the host."""
    losses = []
    for value in values:
        loss = trainer(value).float().pow(2).mean()
        trainer.backward(loss, **options)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def outcome(trainer) -> list[torch.Tensor]:
    """Parameters and states of the optimizer, on the host."""
    states = trainer.optimizer.state_dict()["state"]
    tensors = [*trainer.state_dict().values(), *(value for one in states.values() for value in one.values())]
    return [value.detach().cpu() for value in tensors]
