"""Measure how many bytes move for experts that get no token.

python benchmarks/moe_rows.py [--layers 8] [--experts 16] [--hidden 256] [--tokens 4 64 1024]
Layers of experts, one expert per token, as stacked parameters (transformers' form) and as a module per expert, under a
device budget of a quarter of the parameters. For both: bytes copied between the tiers in a training step with AdamW and
in a forward without gradients, and the bytes of the experts that get a token.
"""

from collections.abc import Callable
from functools import partial

import torch
from report import options, publish
from torch import nn
from torch.nn import functional

import patrickstar as ps
from patrickstar.testing import NoMeter

WARM_UP, STEPS = 4, 4


class Stacked(nn.Module):
    """Experts as two stacked parameters, of which an operator reads the rows of one expert."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in routes.unique().tolist():
            chosen = routes == expert
            hidden = functional.gelu(functional.linear(x[chosen], self.up[expert]))
            out[chosen] = functional.linear(hidden, self.down[expert])
        return out


class Separate(nn.Module):
    """Experts, each a module."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden, False), nn.GELU(), nn.Linear(2 * hidden, hidden, False))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in routes.unique().tolist():
            chosen = routes == expert
            out[chosen] = self.experts[expert](x[chosen])
        return out


class Layers(nn.Module):
    """Layers of experts with the same routes."""

    def __init__(self, kind: type[Stacked] | type[Separate], layers: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(experts, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, routes)
        return x


def batches(tokens: int, experts: int, hidden: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(tokens, hidden, generator=generator), torch.randint(experts, (tokens,), generator=generator))
        for _ in range(count)
    ]


def copied_bytes(build: Callable[[], nn.Module], data: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, int]:
    """Return the mean bytes copied between the tiers in a step, and in a forward without gradients."""
    numel = sum(param.numel() for param in build().parameters())
    config = ps.Config(device="cpu", device_memory=numel // 2 + (4 << 20), chunk_size="512KiB")
    engine = ps.Engine(build, config, meter=NoMeter())
    figures = []
    for train in (True, False):
        copied = []
        for x, routes in data:
            with torch.set_grad_enabled(train):
                out = engine(x, routes)
            if train:
                engine.backward(out.float().square().mean())
                engine.optimizer.step()
            counted = engine.inspect()
            copied.append(counted.h2d_bytes + counted.d2h_bytes)
        figures.append((copied[-1] - copied[WARM_UP - 1]) // STEPS)
    engine.close()
    return figures[0], figures[1]


def main() -> None:
    given = options(__doc__, layers=8, experts=16, hidden=256, tokens=[4, 64, 1024])
    expert_bytes = 2 * 4 * given.hidden**2
    rows = []
    for tokens in given.tokens:
        data = batches(tokens, given.experts, given.hidden, WARM_UP + STEPS)
        touched = sum(routes.unique().numel() for _, routes in data[WARM_UP:]) / STEPS * given.layers * expert_bytes
        for name, kind in {"stacked": Stacked, "separate": Separate}.items():
            build = partial(Layers, kind, given.layers, given.experts, given.hidden)
            step, forward = copied_bytes(build, data)
            figures = {"experts that get a token": touched, "training step": step, "forward without gradients": forward}
            cells = {column: f"{nbytes / 1e6:.1f}" for column, nbytes in figures.items()}
            rows.append({"tokens": str(tokens), "experts": name} | cells)
    publish(
        "moe-rows",
        "cpu",
        f"Megabytes copied between the tiers, mean of {STEPS} steps after {WARM_UP}: {given.layers} layers with "
        f"{given.experts} experts of {expert_bytes / 1e6:.2f} MB in bf16, "
        f"{given.layers * given.experts * expert_bytes / 1e6:.1f} MB together, one expert per token and layer, a "
        f"device budget of a quarter of them plus 4 MiB.",
        rows,
    )


if __name__ == "__main__":
    main()
