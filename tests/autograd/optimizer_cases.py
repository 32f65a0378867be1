"""Optimizers that the tests of this folder train with: this package's, PyTorch's, and user-defined ones."""

import functools
from dataclasses import dataclass

import torch
from toys import mean_square
from transformers.optimization import Adafactor

import patrickstar as ps

from .zoo import Stack, linear, mlp, normal_batches

# User-defined optimizers


@dataclass(frozen=True)
class SignRule(ps.Rule):
    """Step in the direction of the sign of a gradient average."""

    lr: float
    smoothing: float

    @property
    def kinds(self):
        """Average of gradients."""
        return ("velocity",)

    def apply(self, master, grad, states):
        """The list."""
        (velocity,) = states
        velocity.mul_(self.smoothing).add_(grad)
        master.sub_(velocity.sign().mul_(self.lr))


class SignSGD(ps.Optimizer):
    """User-defined sign-SGD with momentum."""

    lr: float = 1e-2
    smoothing: float = 0.9

    def rule(self, group, step, memory):
        """One update."""
        return SignRule(float(group["lr"]), group["smoothing"])


class Counting(ps.Optimizer):
    """Keeps a scalar of its own and shortens the steps as it grows."""

    lr: float = 1e-2

    def rule(self, group, step, memory):
        """One update."""
        memory["updates"] = memory.get("updates", 0) + 1
        assert memory["updates"] == step
        return SignRule(group["lr"] / step, 0.5)


class TwoSpeeds(torch.optim.Optimizer):
    """Minimal Lookahead as a `torch.optim.Optimizer`: fast weights return to slow weights every third step."""

    def __init__(self, params, lr=1e-2, every=3):
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        """One update."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["slow"] = torch.tensor(0.0), param.clone()
                state["step"] += 1
                param.sub_(param.grad, alpha=group["lr"])
                if state["step"] % group["every"] == 0:
                    param.copy_(state["slow"].lerp_(param, 0.5))


Torch = torch.optim
partial = functools.partial
OWN = {
    "Adam": ps.Adam(lr=1e-2),
    "SGD": ps.SGD(lr=0.1),
    "SGD with momentum": ps.SGD(lr=0.1, momentum=0.9, dampening=0.1),
    "SGD with Nesterov's momentum": ps.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD with weight decay": ps.SGD(lr=0.1, weight_decay=0.1),
    "Lion": ps.Lion(lr=1e-2),
    "Lion with weight decay": ps.Lion(lr=1e-2, betas=(0.3, 0.5), weight_decay=0.1),
    "schedule-free AdamW": ps.ScheduleFreeAdamW(lr=1e-2, warmup_steps=2, weight_decay=0.1),
    "AdamW, 8-bit": ps.AdamW8bit(lr=1e-2, weight_decay=0.1),
    "a user's": SignSGD(),
    "counting": Counting(),
}
THEIRS = {
    "RMSprop": Torch.RMSprop,
    "RMSprop, centered": partial(Torch.RMSprop, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1),
    "Adagrad": Torch.Adagrad,
    "Adagrad from 0.1": partial(Torch.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "NAdam": Torch.NAdam,
    "NAdam, decoupled": partial(Torch.NAdam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": Torch.AdamW,
    "AdamW, amsgrad": partial(Torch.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(Torch.SGD, lr=0.1),
    "SGD with momentum": partial(Torch.SGD, lr=0.1, momentum=0.9),
    "home-made": TwoSpeeds,
    "Adafactor": partial(Torch.Adafactor, lr=1e-2, weight_decay=0.1),
    "Adafactor of transformers": Adafactor,
    "Adafactor of transformers, with momentum": partial(
        Adafactor, lr=1e-2, beta1=0.9, scale_parameter=True, relative_step=False, weight_decay=0.1
    ),
}
OPTIMIZERS = {f"ps: {name}": it for name, it in OWN.items()} | {f"torch: {name}": it for name, it in THEIRS.items()}
SOME = ["ps: SGD with momentum", "ps: Lion", "ps: a user's"]


def build(checkpointing="off"):
    return Stack([mlp(), linear()], checkpointing)


def plain_sgd(steps, **options):
    """Train a model with `torch.optim.SGD`; return it, its optimizer and a function for further steps."""
    torch.manual_seed(0)
    model = build()
    optimizer = Torch.SGD(model.parameters(), foreach=False, **options)
    plain_steps(model, optimizer, steps)
    return model, optimizer


def plain_steps(model, optimizer, steps, first=0):
    for (x,) in normal_batches(first + steps)[first:]:
        mean_square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
