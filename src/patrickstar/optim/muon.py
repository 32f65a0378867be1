"""Muon for the matrices of hidden layers, and AdamW for all other parameters."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import nn

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.muon import MuonRule
from patrickstar.optim.adam import AdamW
from patrickstar.optim.optimizer import Optimizer, not_negative

USE_MUON = "use_muon"
"""Option of a param group: its parameters are matrices, which Muon updates."""


class Muon(Optimizer):
    """Muon (Jordan et al. 2024), as `torch.optim.Muon`, with AdamW for what is no matrix of a hidden layer.

    Matrices take 10 bytes of model data per parameter, the others 14. By default Muon updates every parameter of two
    dimensions that is not a weight of an `nn.Embedding`, nor shared with one, nor of the last `nn.Linear`. To choose
    others, give param groups with the option `use_muon`.
    """

    lr: float = 1e-3
    """Learning rate of the matrices. Default 1e-3."""
    weight_decay: float = 0.1
    """Decoupled weight decay coefficient of the matrices. Default 0.1."""
    momentum: float = 0.95
    """Weight of the earlier momentum. Default 0.95."""
    nesterov: bool = True
    """Use Nesterov momentum. Default True."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Coefficients of the polynomial of the Newton-Schulz iterations. Default (3.4445, -4.775, 2.0315)."""
    eps: float = 1e-7
    """Lower bound of the norm that a matrix is divided by. Default 1e-7."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Number of Newton-Schulz iterations. Default 5."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """Factor of the learning rate of a matrix: "original" for `sqrt(max(1, rows / columns))`, "match_rms_adamw" for
    `0.2 * sqrt(max(rows, columns))`, with which learning rates of AdamW suit. Default None: "original"."""
    adamw: AdamW = AdamW()
    """Optimizer of the other parameters. Default `AdamW()`."""

    _checked = field_validator("lr", "weight_decay", "momentum", "eps")(not_negative)

    def defaults(self) -> dict[str, Any]:
        """Return the default options of a param group of matrices, and those of AdamW that Muon lacks."""
        own = {name: value for name, value in super().defaults().items() if name != "adamw"}
        return self.adamw.defaults() | own | {USE_MUON: True}

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return param groups of matrices and of other parameters; groups without `use_muon` are divided.

        Args:
            module: The model.

        Returns:
            Dictionaries as `torch.optim` takes them.
        """
        matrices, others = hidden_matrices(module), self.adamw.defaults()
        groups: list[dict[str, Any]] = []
        for group in super().groups(module):
            if USE_MUON in group:
                groups.append(group if group[USE_MUON] else others | group)
                continue
            options = {name: value for name, value in group.items() if name != "params"}
            params = list(group["params"])
            parts = {
                True: [param for param in params if param in matrices],
                False: [param for param in params if param not in matrices],
            }
            if parts[True]:
                groups.append({"params": parts[True], USE_MUON: True} | options)
            if parts[False]:
                # A learning rate and a weight decay that were given for all are those of the matrices.
                ours = {name: value for name, value in options.items() if name not in ("lr", "weight_decay")}
                if options.get("weight_decay") == 0:
                    ours["weight_decay"] = 0.0
                groups.append({"params": parts[False]} | others | {USE_MUON: False} | ours)
        return groups

    @property
    def states(self) -> tuple[str, ...]:
        """Chunk lists of all parameters together: the momentum of matrices, and the states of AdamW."""
        return tuple(kind for rule in self.default_rules() for kind in rule.kinds)

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Dtypes of states of AdamW; see `Optimizer.state_dtypes`."""
        return self.adamw.state_dtypes

    def default_rules(self) -> tuple[MuonRule | AdamRule, ...]:
        """Return the rules of a matrix and of another parameter, with default options."""
        return tuple(self.rule(self.defaults() | {USE_MUON: use}, 1, {}) for use in (True, False))

    def lists_for(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the chunk lists of a param group: those of its own rule."""
        return self.states_for(group)

    def lists_by_param(self, module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
        """Return the chunk lists of each parameter; those in no param group have the lists of AdamW."""
        lists = dict.fromkeys(module.parameters(), self.adamw.states)
        for group in self.groups(module):
            lists |= dict.fromkeys(group["params"], self.lists_for(self.defaults() | group))
        return lists

    def whole_params(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the matrices: their products need all elements."""
        return {param for group in self.groups(module) if group.get(USE_MUON, True) for param in group["params"]}

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> MuonRule | AdamRule:
        """Return the rule of one update by Muon or AdamW; see `Optimizer.rule`."""
        if not group.get(USE_MUON, True):
            return self.adamw.rule(group, step, memory)
        return MuonRule(
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            coefficients=tuple(group["ns_coefficients"]),
            steps=group["ns_steps"],
            eps=group["eps"],
            adjust_lr=group["adjust_lr_fn"],
        )


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that Muon is meant for: matrices, except those of embeddings and of the output layer."""
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    excluded = {child.weight for child in module.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)}
    excluded |= {child.weight for child in linears[-1:]}
    return {param for param in module.parameters() if param.dim() == 2 and param not in excluded}
