"""Models of ``patrickstar plan``: presets, whose workload is computed by formulas, and traced configurations."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from patrickstar._cli.open_models import OPEN_MODELS, find_open_model
from patrickstar._cli.presets import EXPERT_PRESETS, MOE_PRESETS, PRESETS, T5_PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import Workloads, gpt_workload, t5_workload
from patrickstar.errors import ConfigError


@dataclass(frozen=True)
class PlannedModel:
    """Model to plan for.

    Attributes:
        workloads: Returns the workloads of one process of a mesh.
    """

    name: str
    sequence: int
    workloads: Callable[[Mesh], Workloads]


def find_planned_model(name: str, sequence: int, machine: Machine, capacity_factor: float | None) -> PlannedModel:
    """Find a model by preset, whose workload is computed by formulas, or configuration, which is traced in a dry run.

    The configuration is a file, that of a preset for training with experts, or that of a well-known open model.

    Raises:
        ConfigError: The name is neither, and the message suggests the nearest names; or the model has no experts for
            which the capacity factor could be.
    """
    presets: dict[str, Gpt | T5] = {**PRESETS, **T5_PRESETS, **MOE_PRESETS}
    if name in presets:
        return planned_shape(name, replace(presets[name], sequence=sequence), capacity_factor)
    if name not in EXPERT_PRESETS and find_open_model(name) is None and not Path(name).exists():
        known = [*presets, *EXPERT_PRESETS, *OPEN_MODELS]
        nearest = get_close_matches(name.lower(), known, n=3, cutoff=0.3) or known
        raise ConfigError(f"{name!r} is neither a known model nor a file; did you mean {', '.join(nearest)}?")
    if capacity_factor is not None:
        raise ConfigError(
            f"--capacity-factor {capacity_factor:g} is for presets with experts: {', '.join(MOE_PRESETS)}"
        )
    return _traced(name, sequence, machine)


def planned_shape(name: str, shape: Gpt | T5, capacity_factor: float | None = None) -> PlannedModel:
    """Return the model of a shape."""
    if capacity_factor is not None:
        if shape.experts is None:
            raise ConfigError(f"--capacity-factor {capacity_factor:g}: {name} has no experts")
        shape = replace(shape, experts=replace(shape.experts, capacity_factor=capacity_factor))
    if isinstance(shape, T5):
        layers, of_shape = f"{shape.layers} encoder and {shape.layers} decoder layers", partial(t5_workload, shape)
    else:
        layers, of_shape = f"{shape.layers} layers", partial(gpt_workload, shape)
    text = f"{name}, {layers} x {shape.hidden}{_described(shape.experts)}"
    return PlannedModel(text, shape.sequence, lambda mesh: partial(of_shape, mesh=mesh))


def _described(experts: Experts | None) -> str:
    if experts is None:
        return ""
    where = "each layer" if experts.every == 1 else f"one of {experts.every} layers"
    return f", {experts.count:,} experts in {where}, top-{experts.top_k}"


def _traced(name: str, sequence: int, machine: Machine) -> PlannedModel:
    # Imported here because PyTorch takes seconds to load.
    from patrickstar._cli.dry_run import language_model_workloads
    from patrickstar._cli.model_source import find_model
    from patrickstar._cli.training_setup import check_sequence

    source = find_model(name)
    check_sequence(sequence, source)
    workloads = language_model_workloads(source, sequence, machine)

    def of_mesh(mesh: Mesh) -> Workloads:
        if mesh.lockstep:
            raise ConfigError(
                f"--tp {mesh.tp} --ep {mesh.ep}: {name} is traced as one process runs it; only presets can be divided"
            )
        return workloads

    return PlannedModel(source.name, sequence, of_mesh)
