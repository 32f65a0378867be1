"""Probe of a `torch.optim.Optimizer` class: whether it can run on chunks, and what it needs."""

import copy
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
from patrickstar._kernels.torch_optim_group import GroupOptimizer, Member, attributes_of
from patrickstar.errors import ConfigError

# [Note: probe]
# One optimizer updates small parameters in two param groups as usual, over enough steps for warm-ups and periods, with
# learning rates that change and gradients that are missing. The adapter then updates pieces of each parameter with the
# same gradients. If the results agree, the class is element-wise, and parameters may be cut between processes. If not,
# the adapter updates each parameter separately: if those results agree (norms of layers, factored moments, orthogonal
# updates), the class needs whole parameters. If they differ too (norms of all parameters), or an update raises, or
# something changes that such updates would not keep, used or not (attributes of the optimizer, states that belong to no
# parameter, random numbers, writes into a param group that depend on parameters), then the class is run on all
# parameters together, saved and resumed halfway: see [Note: all parameters together]. If these results differ as well,
# it is refused.

MATRICES = (4, 6), (5, 3), (128, 130)
"""Shapes that every class has to take. The last: some classes factor or quantize only large parameters."""
OTHERS = (7,), (2, 3, 2, 2)
"""Shapes of parameters that many classes treat in another way."""
PAIRS = ((8, 8),) * 4
"""Shapes of parameters of which some classes update two together: the factors of a low-rank matrix."""
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
    together: bool = False
    """True if it needs all parameters at once."""


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
SCENARIOS.append(Scenario(PAIRS, missing=True, second_rate=0.5))
"""Tried in this order until the class trains: what it does not take in plain PyTorch, it will not be given here."""


@dataclass
class ProbeRun:
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
    unsupported: str | None = None
    """Why it can't be repeated on all parameters together either."""

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
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], generators: GlobalGenerators
) -> tuple[Profile | None, str | None]:
    """Return what a class needs, or why it can't run on chunks."""
    run = _run(kind, options, generators)
    large = max(range(len(MATRICES)), key=lambda number: run.params[number].numel())
    names = tuple(name for name, item in run.states[large].items() if is_listed(item, run.params[large]))
    reason = run.refused or _group_coupling(Instances(kind, options), run)
    for whole in () if reason is not None else (False, True):
        reason = _difference(Instances(kind, options), run, names, whole)
        if reason is None:
            return Profile(names, whole, run.writes), None
    generators.restore()
    unsupported = run.unsupported or _difference_together(kind, options, run, names)
    if unsupported is None:
        return Profile(names, False, run.writes, together=True), None
    return None, " and ".join(dict.fromkeys(each for each in (reason, unsupported) if each is not None))


def _run(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], generators: GlobalGenerators) -> ProbeRun:
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
) -> ProbeRun:
    generators.restore()
    values = [_normal(scenario, shape, -1 - number) for number, shape in enumerate(scenario.shapes)]
    params = [torch.nn.Parameter(value.clone()) for value in values]
    second = {name: value for name, value in defaults_of(kind, options).items() if name == "lr"}
    _change_rate(second, scenario.second_rate)
    optimizer = construct(kind, [{"params": params[::2]}, second | {"params": params[1::2]}], options)
    run = ProbeRun(params, [], values, scenario)
    attributes = attributes_of(optimizer)
    if generators.used:
        run.unsupported = "draws random numbers when it is created"
    for step in range(STEPS):
        for group in optimizer.param_groups:
            _change_rate(group, RATE_FACTORS[step % len(RATE_FACTORS)])
        for number, param in enumerate(params):
            param.grad = run.grad(step, number)
        run.before.append([options_of(_copy(group)) for group in optimizer.param_groups])
        idle = [(param, param.detach().clone()) for param in params if param.grad is None]
        with counter_device():
            optimizer.step()
        if not all(torch.equal(*pair) for pair in idle):
            run.unsupported = "changes parameters that have no gradient"
        run.after.append([options_of(_copy(group)) for group in optimizer.param_groups])
        run.refused = run.refused or _refusal(optimizer, attributes, generators)
    if changed := [name for name in differing(attributes, attributes_of(optimizer)) if name not in vars(optimizer)]:
        run.unsupported = f"changes {', '.join(changed)} of its class"
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
    if changed := differing(attributes, attributes_of(optimizer)):
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


def _group_coupling(instances: Instances, run: ProbeRun) -> str | None:
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


def _difference(instances: Instances, run: ProbeRun, names: tuple[str, ...], whole: bool) -> str | None:
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


def _difference_together(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], run: ProbeRun, names: tuple[str, ...]
) -> str | None:
    """Update all parameters together; return how the results differ, None if they don't.

    Values and states are in other memory in each step, and the old memory is overwritten. Halfway another object goes
    on from what is saved.
    """
    optimizer, first = GroupOptimizer(kind, options), run.before[0]
    optimizer.begin(first)
    groups = [_copy(group) for group in first]
    members = [Member(f"{number}", value.clone(), None) for number, value in enumerate(run.values)]
    for member in members:
        member.views = {name: torch.zeros_like(member.value) for name in names}
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = optimizer.saved()
            optimizer = GroupOptimizer(kind, options)
            optimizer.begin(first)
            optimizer.restore(saved)
        for group in groups if step else ():
            _change_rate(group, RATE_FACTORS[step % len(RATE_FACTORS)])
        moved = [
            Member(
                member.name,
                member.value.clone(),
                run.grad(step, number),
                copy.deepcopy(member.memory) if step == STEPS // 2 else member.memory,
                {name: view.clone() for name, view in member.views.items()},
                member.has_state,
            )
            for number, member in enumerate(members)
        ]
        for member in members:
            for tensor in (member.value, *member.views.values()):
                tensor.fill_(math.nan)
        members = moved
        try:
            optimizer.step(groups, [members[::2], members[1::2]])
        except Exception as error:  # see `_run`
            return f"can't update parameters together in other memory than before ({_line(error)})"
        if any(differing(options_of(group), after) for group, after in zip(groups, run.after[step], strict=True)):
            return "writes other options into its param groups once it is saved and resumed"
    for member, param, state in zip(members, run.params, run.states, strict=True):
        found = member.memory | {name: view for name, view in member.views.items() if name in state}
        if not _agree(param.detach(), member.value) or not _agree(state, found if member.has_state else {}):
            return "updates parameters differently once it is saved and resumed"
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
