"""Estimates and dry runs of published models on the machines of the papers, with recomputation."""

from bisect import bisect_left
from dataclasses import replace
from functools import cache, partial

from dry_runs import builder_of, dry_run
from steps import checkpointed
from torch import nn
from transformers import T5ForConditionalGeneration

from patrickstar._models.presets import PRESETS, T5_PRESETS
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import estimate, fits, largest_batch, with_smallest_replicas
from patrickstar._perf_model.t5_costs import T5
from patrickstar._perf_model.workload import shape_workload

MOST_LAYERS = 4096
"""More layers than any of these machines holds."""
ONE_GPU = Mesh()


def replicated(shape: Gpt | T5, batch: int, mesh: Mesh, machine: Machine) -> Mesh:
    """Return the mesh with the smallest replicas in which a model fits with recomputation."""
    return with_smallest_replicas(partial(shape_workload, shape), machine, mesh, (True,), batch)


@cache
def samples_per_s(shape: Gpt | T5, batch: int, machine: Machine, mesh: Mesh, lock_free: bool = False) -> float:
    """Return the estimated samples per second of all processes, of which each has `batch` in a step.

    Raises:
        BudgetError: The model does not fit.
    """
    mesh = replicated(shape, batch, mesh, machine)
    step = estimate(shape_workload(shape, batch, True, mesh), machine, mesh, lock_free=lock_free)
    return step.tokens_per_s / shape.sequence


def most_samples(shape: Gpt | T5, machine: Machine, mesh: Mesh) -> int:
    """Return the largest number of samples per process that fits."""
    mesh = replicated(shape, 1, mesh, machine)
    return largest_batch(partial(shape_workload, shape), machine, mesh, True)


@cache
def deepest_billions(shape: Gpt | T5, machine: Machine, mesh: Mesh) -> float:
    """Return the parameters, in billions, of the deepest model of a shape that fits with one sequence per process."""

    def too_deep(layers: int) -> bool:
        return not fits(shape_workload(replace(shape, layers=layers), 1, True, mesh), machine, mesh)

    layers = bisect_left(range(1, MOST_LAYERS), True, key=too_deep)
    assert 0 < layers < MOST_LAYERS - 1
    return replace(shape, layers=layers).numel / 1e9


def all_gpus_as_one(machine: Machine) -> Machine:
    """Return a machine on which one process transfers and updates as fast as all GPUs together, but computes as one.

    A dry run simulates one process. Here it manages the whole model: the host's memory and rates are those of all
    processes, and a chunk crosses the links of all GPUs, in equal parts, and then the connections between GPUs.
    """
    gpu, links = machine.gpu, machine.links
    assert gpu is not None and links is not None and links.gpu_gpu is not None
    between_s = (gpu.count - 1) / gpu.count / links.gpu_gpu
    h2d, d2h = (1 / (1 / (gpu.count * rate) + between_s) for rate in machine.transfer_rates(gpu.count))
    parts = {"gpu": {"count": 1}, "host": {"sockets": 1}, "links": {"h2d": h2d, "d2h": d2h, "shared_by": 1}}
    return changed(machine, parts)


def changed(machine: Machine, parts: dict[str, dict[str, float]]) -> Machine:
    """Return a machine with other values of some parts."""
    update = {name: getattr(machine, name).model_copy(update=values) for name, values in parts.items()}
    return machine.model_copy(update=update)


def dry_run_s(preset: str, batch: int, sequence: int, machine: Machine) -> float:
    """Return the seconds of a dry-run step, with gradients clipped."""

    def build_t5() -> nn.Module:
        config = T5_PRESETS[preset].config()
        config.use_cache = False
        return checkpointed(T5ForConditionalGeneration(config))

    build = builder_of(preset) if preset in PRESETS else build_t5
    return dry_run(build, machine, batch, sequence).seconds
