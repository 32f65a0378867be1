"""Models that are planned: presets, whose workload is computed by formulas, and configurations and modules, traced."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from patrickstar._models.open_models import OPEN_MODELS, find_open_model
from patrickstar._models.presets import EXPERT_PRESETS, MOE_PRESETS, PRESETS, T5_PRESETS, Preset, T5Preset
from patrickstar._perf_model.adapters import Adapters
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.tiling import NOT_TILED, Tiling
from patrickstar._perf_model.transformer_shape import Checkpointing
from patrickstar._perf_model.workload import RECOMPUTED, Workload, Workloads, of_shares, shape_workload, with_products
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from patrickstar._plan.traced_model import TracedModel


@dataclass(frozen=True)
class PlannedModel:
    """Model to plan for.

    Attributes:
        name: Its name and shape.
        sequence: Tokens of a sequence.
        workload: Returns the workload of one process.
        traced: Returns the model as dry runs train it; None if they can't.
        adapters: Adapters that are added to a model of that name, and trained in its place.
        tiling: What is computed by tiles of tokens.
        shares: Shares of its layers that can be recomputed.
    """

    name: str
    sequence: int
    workload: Workloads
    traced: "Callable[[], TracedModel] | None" = None
    adapters: Adapters | None = None
    tiling: Tiling = NOT_TILED
    shares: tuple[float, ...] = RECOMPUTED


def find_planned_model(
    name: str,
    sequence: int,
    machine: Machine,
    capacity_factor: float | None,
    adapters: Adapters | None = None,
    tiling: Tiling = NOT_TILED,
) -> PlannedModel:
    """Find a model by preset, whose workload is computed by formulas, or configuration, which is traced in a dry run.

    The configuration is a file, that of a preset for training with experts, or that of a well-known open model.
    Formulas are of full fine-tuning in 16 bits: a preset with adapters, with tiles of tokens, or in fp32, is traced.
    Those of open models, which are for adapters, too, are of GPUs: a trace of each batch takes a second.

    Raises:
        ConfigError: The name is neither, and the message suggests the nearest names; the model has no experts for
            which the capacity factor could be; or it is only a formula.
    """
    presets: dict[str, Gpt | T5] = {**PRESETS, **T5_PRESETS, **MOE_PRESETS}
    others = {f"{adapters}": adapters is not None, f"{tiling}": any(tiling), "fp32": machine.precision == "fp32"}
    by_formula = not any(others.values())
    if not by_formula and (name in T5_PRESETS or name in MOE_PRESETS):
        what = next(text for text, asked in others.items() if asked)
        raise ConfigError(f"{name} with {what}: its plan is a formula of full fine-tuning in 16 bits")
    if name in presets and by_formula:
        return planned_shape(name, replace(presets[name], sequence=sequence), capacity_factor)
    if name not in {*PRESETS, *EXPERT_PRESETS} and find_open_model(name) is None and not Path(name).exists():
        known = [*presets, *EXPERT_PRESETS, *OPEN_MODELS]
        nearest = get_close_matches(name.lower(), known, n=3, cutoff=0.3)
        hint = f"did you mean {', '.join(nearest)}?" if nearest else f"known are {', '.join(known)}"
        raise ConfigError(f"{name!r} is neither a known model nor a file; {hint}")
    if capacity_factor is not None:
        raise ConfigError(
            f"--capacity-factor {capacity_factor:g} is for presets with experts: {', '.join(MOE_PRESETS)}"
        )
    # Imported here because PyTorch takes seconds to load.
    from patrickstar._models.model_source import find_model
    from patrickstar._plan.traced_model import language_model

    source = find_model(name)
    source.check_sequence(sequence)
    traced = language_model(source, sequence, adapters, machine.precision, tiling)
    found = None if any(tiling) or machine.gpu is None or machine.precision == "fp32" else find_open_model(name)
    decoder = None if found is None else found.decoder()
    if decoder is None or (adapters is not None and decoder.expert_numel):
        return replace(planned_trace(traced, machine), adapters=adapters)

    def counted(batch: int, checkpointing: Checkpointing) -> Workload:
        return decoder.workload(batch, sequence, checkpointing, adapters)

    return replace(planned_trace(traced, machine, counted), adapters=adapters)


def planned_shape(name: str, shape: Gpt | T5, capacity_factor: float | None = None) -> PlannedModel:
    """Return the model of a shape."""
    if capacity_factor is not None:
        if shape.experts is None:
            raise ConfigError(f"--capacity-factor {capacity_factor:g}: {name} has no experts")
        shape = replace(shape, experts=replace(shape.experts, capacity_factor=capacity_factor))
    traced = partial(_traced_preset, name, shape) if isinstance(shape, Preset | T5Preset) else None
    text = f"{name}, {shape.described_layers} x {shape.hidden}{_described(shape.experts)}"
    return PlannedModel(text, shape.sequence, of_shares(partial(shape_workload, shape)), traced)


def planned_trace(
    model: "TracedModel", machine: Machine, counted: Callable[[int, Checkpointing], Workload] | None = None
) -> PlannedModel:
    """Return a model whose workload is traced in dry runs on a machine, unless it is `counted` by a formula."""
    of_process = with_products(model.workloads(machine)) if counted is None else counted

    def workload(batch: int, checkpointing: Checkpointing, mesh: Mesh) -> Workload:
        if mesh.lockstep:
            raise ConfigError(
                f"--tp {mesh.tp} --ep {mesh.ep}: {model.name} is traced as one process runs it; only presets can be "
                f"divided"
            )
        return of_process(batch, checkpointing)

    return PlannedModel(
        model.name,
        model.row_tokens,
        of_shares(workload),
        lambda: model,
        tiling=model.tiling,
        shares=model.checkpointing,
    )


def _traced_preset(name: str, shape: Preset | T5Preset) -> "TracedModel":
    # Imported here because PyTorch takes seconds to load.
    from patrickstar._models.model_source import preset_source
    from patrickstar._plan.traced_model import language_model

    positions = max(shape.sequence, PRESETS[name].sequence if name in PRESETS else 0)
    return language_model(preset_source(name, replace(shape, sequence=positions)), shape.sequence)


def _described(experts: Experts | None) -> str:
    if experts is None:
        return ""
    where = "each layer" if experts.every == 1 else f"one of {experts.every} layers"
    return f", {experts.count:,} experts in {where}, top-{experts.top_k}"
