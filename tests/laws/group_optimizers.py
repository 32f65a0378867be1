"""Optimizer classes that are run on all parameters together, and the model and loop that tests train them with."""

import torch
from toys import mean_square

import patrickstar as ps

WIDTH = 8


class Base(torch.optim.Optimizer):
    """Base class: a loop over the parameters of a group that have gradients."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.update(group, [param for param in group["params"] if param.grad is not None])


class GlobalScale(Base):
    """Estimates a scalar of the group from all its updates, as D-Adaptation does, and counts steps in the group."""

    def update(self, group, params):
        group["step"] = group.get("step", 0) + 1
        d, numerator, norm = group.get("d", 1e-2), 0.0, 1e-8
        for param in params:
            state = self.state[param]
            if not state:
                state["sum"], state["first"] = torch.zeros_like(param), param.clone()
            state["sum"].add_(param.grad, alpha=d)
            numerator += float((param.grad * (state["first"] - param)).sum())
            norm += float(state["sum"].norm())
        group["d"] = max(d, abs(numerator) / norm)
        for param in params:
            param.sub_(self.state[param]["sum"], alpha=group["lr"] * group["d"] / norm)


class Noise(Base):
    """Adds noise that is drawn for one parameter after the other."""

    def update(self, group, params):
        for param in params:
            average = self.state[param].setdefault("average", torch.randn_like(param) * 0.1)
            param.sub_(average.lerp_(param.grad + torch.randn_like(param) * 0.01, 0.3), alpha=group["lr"])


class Elsewhere(Base):
    """Keeps base rates, a count and values by parameter on the instance, and a norm under a key of its own."""

    def __init__(self, params, lr=0.05):
        self.largest, self.count = {}, 0
        super().__init__(params, lr)
        self.base_rates = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for base, group in zip(self.base_rates, self.param_groups, strict=True):
            for param in group["params"]:
                if param.grad is None:
                    continue
                largest = max(self.largest.get(param, 0.0), float(param.grad.abs().max()))
                self.largest[param] = largest
                shared, norm = self.state["shared"], param.grad.norm()
                shared["norm"] = shared.get("norm", torch.ones_like(norm)) * 0.9 + 0.1 * norm
                rate = group["lr"] * group["lr"] / base / (self.count + largest) / float(shared["norm"])
                param.sub_(param.grad, alpha=rate)


class DecaysAll(Base):
    """Changes parameters that have no gradient, too."""

    words = "changes parameters that have no gradient"

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        for param in params:
            param.mul_(0.99)
        super().step()

    def update(self, group, params):
        for param in params:
            param.sub_(param.grad, alpha=group["lr"])


class CountsInClass(GlobalScale):
    """Counts in its class, which other engines share."""

    words, count = "changes count of its class", 0

    def update(self, group, params):
        type(self).count += 1
        super().update(group, params)


class DrawsWhenCreated(GlobalScale):
    """Draws a random number before the first step."""

    words = "draws random numbers when it is created"

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr * float(torch.rand(())))


KINDS = [GlobalScale, Noise, Elsewhere]


class Branches(torch.nn.Module):
    """One layer gets gradients in every second call only, one none in the first calls, one bias none ever."""

    def __init__(self):
        super().__init__()
        self.stem, self.sometimes, self.late = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.stem.bias.requires_grad_(False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.stem(x))
        x = self.sometimes(x) if self.calls % 2 else x
        return self.late(x) if self.calls > 3 else x


def two_groups(model):
    """Return groups with rates of their own; the frozen bias is in the first."""
    others = [*model.stem.parameters(), *model.sometimes.parameters()]
    return [{"params": others}, {"params": list(model.late.parameters()), "lr": 0.03}]


def config_of(kind, precision="fp32", **options):
    """Return a configuration with a class over two groups."""
    chosen = ps.TorchOptimizer(kind=kind, param_groups=two_groups)
    base = {"device": "cpu", "device_memory": None, "chunk_size": 512}
    return ps.Config(optimizer=chosen, precision=precision, **base | options)


def batch(step):
    """Return the batch of a step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(trainer, optimizer, steps=range(12), accumulation=1, update=False):
    """Train with rates that change; return the losses and what the class wrote into its groups."""
    results = []
    for step in steps:
        for part in range(accumulation):
            loss = mean_square(trainer(batch(step + 1000 * part)))
            trainer.backward(loss, update=update)
            results.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[step % 2]["lr"] *= 0.9
        for group in optimizer.param_groups:
            results += [torch.as_tensor(group[key]).clone() for key in ("lr", "step", "d", "total") if key in group]
    return results
