"""Probe of a `torch.optim.Optimizer` class: whether it can run on chunks, and what it needs."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from patrickstar._kernels.one_thread import one_thread
from patrickstar._kernels.torch_optim_adapter import (
    Instances,
    TorchOptimRule,
    construct,
    counter_device,
    defaults_of,
    differing,
    frozen,
    import_compiler,
    is_listed,
    options_of,
)
from patrickstar.errors import ConfigError

# [Note: probe]
# One optimizer updates small parameters in two param groups as usual, over enough steps for warm-ups and periods, with
# learning rates that change and gradients that are missing. The adapter then updates pieces of each parameter with the
# same gradients. If the results agree, the class is element-wise, and parameters may be cut between processes. If not,
# the adapter updates each parameter separately: if those results agree (norms of layers, factored moments, orthogonal
# updates), the class needs whole parameters. If they differ too (norms of all parameters), or an update raises, the
# class is refused. What the adapter would not keep is refused as soon as it changes, used or not: attributes of the
# optimizer, states that belong to no parameter, random numbers, writes into a param group that depend on parameters.

MATRICES = (4, 6), (5, 3), (128, 130)
"""Shapes that every class has to take. The last: some classes factor or quantize only large parameters."""
OTHERS = (7,), (2, 3, 2, 2)
"""Shapes of parameters that many classes treat in another way."""
STEPS = 32
"""More than the warm-up of RAdam's rectification and three of the usual periods, of 5, 6 and 10 steps."""
RATE_FACTORS = 1.0, 0.5, 2.0
"""Factors by which learning rates change before each of three steps; together they leave them as they are."""
RTOL = 1e-9
"""Relative difference in double precision beyond which results differ: PyTorch rounds the end of a tensor otherwise."""


class Profile(NamedTuple):
    """States and needs of a class."""

    names: tuple[str, ...]
    """Names of its states of the parameter's shape."""
    whole: bool
    """True if it needs whole parameters."""
    writes: tuple[str, ...]
    """Options that it writes into its param groups."""


@dataclass(frozen=True)
class Scenario:
    """Parameters and gradients of a probe."""

    shapes: Sequence[tuple[int, ...]]
    missing: bool
    """Some gradients are missing."""
    second_rate: float
    """Learning rate of the second param group, relative to that of the first."""
    dtype: torch.dtype = torch.float64


SCENARIOS = [
    Scenario(shapes, missing, second_rate)
    for second_rate in (0.5, 1.0)
    for missing in (True, False)
    for shapes in (MATRICES + OTHERS, MATRICES + OTHERS[:1], MATRICES)
]
SCENARIOS.append(replace(SCENARIOS[0], dtype=torch.float32))
"""Tried in this order until the class trains: what it does not take in plain PyTorch, it will not be given here."""


@dataclass
class Run:
    """A run of a class as usual, and what it was given."""

    params: list[torch.nn.Parameter]
    states: list[dict[str, Any]]
    values: list[torch.Tensor]
    """Initial values."""
    scenario: Scenario
    before: list[list[dict[str, Any]]] = field(default_factory=list)
    """Options of the two param groups before each step."""
    after: list[list[dict[str, Any]]] = field(default_factory=list)
    """The same after it."""
    refused: str | None = None
    """Why it can't be repeated on chunks, as far as one can see."""

    def grad(self, step: int, number: int) -> torch.Tensor | None:
        """Return the gradient of a parameter in a step, drawn anew: those of all steps would take megabytes."""
        if self.scenario.missing and _is_missing(step, number):
            return None
        return _normal(self.scenario, self.scenario.shapes[number], 1 + step * len(self.params) + number)

    @property
    def writes(self) -> tuple[str, ...]:
        """Options that a step has changed."""
        pairs = zip(itertools.chain(*self.before), itertools.chain(*self.after), strict=True)
        return tuple(dict.fromkeys(name for pair in pairs for name in differing(*pair)))


def probe(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Profile:
    """Find out what a class needs. See [Note: probe].

    Args:
        kind: The class.
        options: Keyword arguments of its constructor.

    Returns:
        Its states and needs.

    Raises:
        ConfigError: The class can't update parameters separately.
    """
    import_compiler()
    generators = GlobalGenerators()
    try:
        with one_thread():
            profile, reason = _profile(kind, options, generators)
    finally:
        generators.restore()
    if profile is not None:
        return profile
    raise ConfigError(
        f"{kind.__name__}({_format_options(options)}) {reason}, so it can't run on chunks, of which only some are in "
        f"memory at a time; use an optimizer such as ps.AdamW"
    )


def _profile(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], generators: "GlobalGenerators"
) -> tuple[Profile | None, str | None]:
    """Return what a class needs, or why it can't run on chunks."""
    run = _run(kind, options, generators)
    reason = run.refused or _group_coupling(Instances(kind, options), run)
    if reason is None:
        large = max(range(len(MATRICES)), key=lambda number: math.prod(MATRICES[number]))
        names = tuple(name for name, item in run.states[large].items() if is_listed(item, run.params[large]))
        for whole in (False, True):
            reason = _difference(Instances(kind, options), run, names, whole)
            if reason is None:
                return Profile(names, whole, run.writes), None
    return None, reason


class GlobalGenerators:
    """State of the global random generators when it was created."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @property
    def used(self) -> bool:
        """True if a generator has been used since."""
        return not (
            torch.equal(self._torch, torch.get_rng_state())
            and self._python == random.getstate()
            and all(np.array_equal(*pair) for pair in zip(self._numpy, np.random.get_state(), strict=True))
        )

    def restore(self) -> None:
        """Return to that state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _run(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], generators: GlobalGenerators) -> Run:
    """Run a class as usual, in the first scenario that it takes."""
    error: Exception | None = None
    for scenario in SCENARIOS:
        try:
            return _try(kind, options, scenario, generators)
        except Exception as caught:  # a class of any library may raise anything
            error = caught
    raise ConfigError(
        f"{kind.__name__}({_format_options(options)}) can't update a matrix: {_line(error)}; use an optimizer such as "
        f"ps.AdamW"
    ) from error


def _try(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], scenario: Scenario, generators: GlobalGenerators
) -> Run:
    values = [_normal(scenario, shape, -1 - number) for number, shape in enumerate(scenario.shapes)]
    params = [torch.nn.Parameter(value.clone()) for value in values]
    second = {name: value for name, value in defaults_of(kind, options).items() if name == "lr"}
    _change_rate(second, scenario.second_rate)
    optimizer = construct(kind, [{"params": params[::2]}, second | {"params": params[1::2]}], options)
    run = Run(params, [], values, scenario)
    attributes = _attributes(optimizer)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            _change_rate(group, RATE_FACTORS[step % len(RATE_FACTORS)])
        for number, param in enumerate(params):
            param.grad = run.grad(step, number)
        run.before.append([options_of(_copy(group)) for group in optimizer.param_groups])
        with counter_device():
            optimizer.step()
        run.after.append([options_of(_copy(group)) for group in optimizer.param_groups])
        run.refused = _refusal(optimizer, attributes, generators)
        if run.refused is not None:
            break
    run.states = [dict(optimizer.state.get(param, {})) for param in params]
    return run


def _normal(scenario: Scenario, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=scenario.dtype, device="cpu")


def _refusal(
    optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any], generators: GlobalGenerators
) -> str | None:
    """Return what the adapter would not keep of a step that was made, None if nothing."""
    if generators.used:
        return "draws random numbers"
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if any(id(key) not in known for key in optimizer.state):
        return "keeps a state that belongs to no parameter"
    if changed := differing(attributes, _attributes(optimizer)):
        return f"changes {', '.join(changed)} outside of its states and param groups"
    return None


def _is_missing(step: int, number: int) -> bool:
    """Return whether a parameter has no gradient: its first, one amid others, or those of a param group."""
    return (step, number) in ((0, 1), (4, 0), (5, 0)) or (step == 6 and number % 2 == 1)


def _change_rate(group: dict[str, Any], factor: float) -> None:
    if isinstance(group.get("lr"), int | float | torch.Tensor):
        group["lr"] = group["lr"] * factor


def _copy(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the attributes of an optimizer and of its classes, without states and param groups."""
    classes = [each for each in type(optimizer).__mro__ if each not in torch.optim.Optimizer.__mro__]
    attributes = {name: item for each in reversed(classes) for name, item in vars(each).items()} | vars(optimizer)
    return {name: frozen(item) for name, item in attributes.items() if name not in ("state", "param_groups")}


def _group_coupling(instances: Instances, run: Run) -> str | None:
    """Return why writes into param groups depend on the parameters; None if they don't."""
    if not run.writes:
        return None
    for step, (before, after) in enumerate(zip(run.before, run.after, strict=True)):
        for number in range(len(before)):
            updated = any(run.grad(step, each) is not None for each in range(number, len(run.params), 2))
            try:
                alone = instances.options_after(before[number], updated, run.values[0].dtype)
            except Exception as error:  # see `_run`
                return f"can't write into a param group on its own ({_line(error)})"
            if changed := differing(after[number], alone):
                return f"writes {', '.join(changed)} into its param groups by all parameters together"
            if lost := before[number].keys() - alone.keys():
                return f"removes {', '.join(sorted(lost))} from its param groups"
    return None


def _difference(instances: Instances, run: Run, names: tuple[str, ...], whole: bool) -> str | None:
    """Update parameters, or pieces of them, separately; return how the results differ, None if they don't."""
    for number, (value, param, state) in enumerate(zip(run.values, run.params, run.states, strict=True)):
        flat, lists = (
            value.reshape(-1).clone(),
            [torch.zeros(value.numel(), dtype=value.dtype, device="cpu") for _ in names],
        )
        for part in _parts(value.numel(), whole):
            memory, count = dict[str, Any](), 0
            for step, (before, after) in enumerate(zip(run.before, run.after, strict=True)):
                grad, group = run.grad(step, number), number % 2
                if grad is None:
                    continue
                count += 1
                rule = TorchOptimRule(instances, before[group], names, memory, count, whole, after[group])
                if whole:
                    rule = rule.for_param(tuple(value.shape), value.stride(), value.device)
                try:
                    rule.apply(flat[part], grad.reshape(-1)[part], [each[part] for each in lists])
                except Exception as error:  # see `_run`
                    return f"can't update parameters separately ({_line(error)})"
            if not _agree({key: item for key, item in state.items() if key not in names}, memory):
                return "updates parameters differently together and separately"
        found = {name: each.view(value.shape) for name, each in zip(names, lists, strict=True)}
        expected = {name: state[name] for name in names if name in state}
        if not _agree(param.detach(), flat.view(value.shape)) or not _agree(
            expected, {name: found[name] for name in expected}
        ):
            return "updates parameters differently together and separately"
    return None


def _parts(numel: int, whole: bool) -> list[slice]:
    """Return the pieces in which a parameter is updated: all of it, or one element, a third, and the rest."""
    return [slice(None)] if whole else [slice(1), slice(1, numel // 3), slice(max(1, numel // 3), None)]


def _agree(one: Any, other: Any) -> bool:
    """Return whether two results agree but for rounding; those of other types, such as quantized tensors, may."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_agree(one[key], other[key]) for key in one)
    if type(one) is type(other) is torch.Tensor and one.is_floating_point():
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=RTOL, atol=0)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RTOL)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_agree(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, int | str) or type(one) is torch.Tensor:
        return frozen(one) == frozen(other)
    return type(one) is type(other)


def _line(error: BaseException | None) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


def _format_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
