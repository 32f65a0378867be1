"""Which optimizer classes train exactly, and which are refused?

python benchmarks/optimizers.py [CLASS ...]
Trains a small model with every optimizer class of the packages in `PACKAGES` that are installed, or with those named:
in plain PyTorch twice, and with the engine, which evicts every chunk at each access. 30 steps in fp32 with learning
rates that change, two param groups, one frozen parameter, and a layer without gradients in some steps. Prints a line
for each class; without arguments it also writes docs/optimizers.md. The packages are not dependencies: install them
with `pip install --no-deps`.
"""

import importlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from report import filled, table
from torch import nn

import patrickstar as ps
from patrickstar import testing
from patrickstar.errors import ConfigError

PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "dadaptation": "dadaptation",
    "prodigyopt": "prodigyopt",
    "lion_pytorch": "lion-pytorch",
    "schedulefree": "schedulefree",
    "transformers.optimization": "transformers",
    "torchao.optim": "torchao",
}
"""Modules, and the distributions that they are from."""
STEPS, WIDTH = 30, 16
EXACT, WRONG, REFUSED, PLAIN = "exact", "**wrong**", "refused", "not in plain PyTorch"
PAGE = Path(__file__).parent.parent / "docs/optimizers.md"

Outcome = tuple[str, str, str]
"""One of the four words above, how the class runs (see `runs`), and the reason."""


class Net(nn.Module):
    """Linear layers, a normalization and a convolution; one layer is used in two of three steps, one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.large, self.norm, self.conv = nn.Linear(WIDTH, 256), nn.LayerNorm(256), nn.Conv2d(1, 4, 3)
        self.first.bias.requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.sometimes(x)) if self.calls % 3 else x
        large = self.norm(self.large(self.last(x)))
        return self.conv(large.view(-1, 1, 16, 16)).pow(2).mean()


class Matrices(nn.Module):
    """Model with matrices only, for classes that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.first(self.frozen(x)))
        return self.last(torch.tanh(self.sometimes(x)) if self.calls % 3 else x).pow(2).mean()


def groups_of(model: nn.Module, second_rate: float | None) -> list[dict[str, Any]]:
    """Return two param groups, the second with a learning rate of its own unless it is None."""
    params = list(model.parameters())
    own = {} if second_rate is None else {"lr": second_rate}
    return [{"params": params[::2]}, {"params": params[1::2]} | own]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Any) -> list[torch.Tensor]:
    """Train and return the losses and the parameters. `engine`: None in plain PyTorch."""
    results, generator = [], torch.Generator().manual_seed(1)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(STEPS):
        loss = (engine or model)(torch.randn(4, WIDTH, generator=generator))
        loss.backward() if engine is None else engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] *= (0.5, 1.5, 1.2)[step % 3]
        results.append(loss.detach().clone())
    return [*results, *(engine or model).state_dict().values()]


def plain(kind: type[torch.optim.Optimizer], build: type[nn.Module], second_rate: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build()
    return train(model, kind(groups_of(model, second_rate)), None)


def outcome(kind: type[torch.optim.Optimizer]) -> Outcome:
    """Train with a class, first in plain PyTorch."""
    try:
        rate = getattr(kind([nn.Parameter(torch.zeros(2, 2))]), "defaults", {}).get("lr")
    except Exception as error:  # a class of any library may raise anything
        return PLAIN, "", line(error)
    halved, reason = rate / 2 if isinstance(rate, float) else None, ""
    for build, second_rate in ((Net, halved), (Net, None), (Matrices, halved), (Matrices, None)):
        try:
            expected = plain(kind, build, second_rate)
        except Exception as error:
            reason = line(error)
            continue
        if not same(expected, plain(kind, build, second_rate)):
            return PLAIN, "", "two runs of one seed differ"
        return compared(kind, build, second_rate, expected)
    return PLAIN, "", reason


def compared(
    kind: type[torch.optim.Optimizer], build: type[nn.Module], second_rate: float | None, expected: list[torch.Tensor]
) -> Outcome:
    """Train with the engine and compare with the results of plain PyTorch."""
    options: dict[str, Any] = {"device": "cpu", "device_memory": "1MiB", "chunk_size": 4 * WIDTH * 256}
    torch.manual_seed(0)
    try:
        optimizer = ps.TorchOptimizer(kind=kind, param_groups=lambda model: groups_of(model, second_rate))
        engine = testing.stressed(build, ps.Config(precision="fp32", optimizer=optimizer, **options))
    except ConfigError as error:
        return REFUSED, "", re.split(", so it can|; use an optimizer", line(error))[0]
    try:
        found = train(engine.module, engine.optimizer, engine)
    except ConfigError as error:
        first = engine.module.calls == 1  # nothing was trained before
        return REFUSED if first else WRONG, runs(optimizer), f"refused while it trains: {line(error)}"
    finally:
        engine.close()
    if same(expected, found):
        return EXACT, runs(optimizer), ""
    return WRONG, runs(optimizer), f"from step {first_difference(expected, found)} on"


def runs(optimizer: ps.Optimizer) -> str:
    """Return on what a class runs."""
    return "all parameters together" if optimizer.updates_together else "one parameter at a time"


def line(error: Exception) -> str:
    return " ".join(f"{error}".split()).replace("|", "\\|") or type(error).__name__


def same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def first_difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> int:
    return next(number for number, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair))


def classes() -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    """Yield the names and optimizer classes of the packages, each once."""
    known = {torch.optim.Optimizer}
    for name in PACKAGES:
        try:
            members = vars(importlib.import_module(name))
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        for key, member in sorted(members.items()):
            if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member not in known:
                known.add(member)
                yield f"{name}.{key}", member


def main() -> None:
    """Try the classes and write the page."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen, rows = sys.argv[1:], []
    for name, kind in classes():
        if not chosen or name in chosen or kind.__name__ in chosen:
            word, how, reason = outcome(kind)
            rows.append((name, word, how, reason))
            print(name, word, how, reason, sep=" | ", flush=True)
    counts = Counter(word for _, word, _, _ in rows)
    trained = sum(counts[word] for word in (EXACT, WRONG, REFUSED))
    print(f"{counts[EXACT]} of {trained} train exactly, {counts[WRONG]} wrong, {counts[REFUSED]} refused")
    if not chosen:
        packages = table(list(by_package(rows)), ("package", "version", "exact, of those that train in plain PyTorch"))
        named = [(f"`{name}`", *rest) for name, *rest in rows]
        results = table(named, ("class", "trains", "runs on", "reason"))
        counted = {"exact": counts[EXACT], "trained": trained, "refused": counts[REFUSED]}
        PAGE.write_text(filled("optimizers", **counted, packages=packages, table=results))


def by_package(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, version and counts of each package."""
    for module, package in PACKAGES.items():
        words = Counter(word for name, word, _, _ in rows if name.rpartition(".")[0] == module)
        trained = sum(words[word] for word in (EXACT, WRONG, REFUSED))
        if found := installed(package):
            yield package, found, f"{words[EXACT]} of {trained}"


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
