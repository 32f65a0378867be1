"""A model with matrices of all kinds, and options of Muon, for laws on several devices.

Without an import of transformers, which takes two seconds.
"""

import torch
from torch import nn

import patrickstar as ps

WIDTH = 64


class Model(nn.Module):
    """Tall, wide, square and column-major matrices, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.tall = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.square, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        # Column-major, as some checkpoints store it.
        self.turned = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).div(8).t())
        self.head = nn.Linear(2 * WIDTH, 24)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for wide, tall in zip(self.wide, self.tall, strict=True):
            hidden = self.norm(hidden + tall(wide(hidden).tanh()))
        return self.head(self.square(hidden) @ self.turned)


def all_by_muon(model: nn.Module) -> list[dict]:
    """Return param groups that name their rule, with options of their own."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [
        {"params": matrices, "use_muon": True, "adjust_lr_fn": "match_rms_adamw"},
        {"params": others, "use_muon": False, "lr": 3e-3, "betas": (0.8, 0.9)},
    ]


def one_group(model: nn.Module) -> list[dict]:
    """Return a param group that leaves the choice of the rule to Muon."""
    return [{"params": list(model.parameters()), "lr": 2e-2}]


MUON = {
    "Muon": ps.Muon(lr=2e-2),
    "Muon without Nesterov": ps.Muon(lr=2e-2, nesterov=False, momentum=0.4, weight_decay=0.0, ns_steps=3),
    "Muon in groups": ps.Muon(lr=2e-2, param_groups=all_by_muon),
    "Muon, averaged": ps.EMA(ps.Muon(lr=2e-2), decay=0.9),
    "Muon, averaged, in one group": ps.EMA(ps.Muon(param_groups=one_group), decay=0.9),
}
