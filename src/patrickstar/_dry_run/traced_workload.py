"""The work of any model's step, traced on tensors without bytes: no accelerator, and no memory for weights."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from patrickstar._dry_run.op_tracer import OpCost, matrix_size, operations
from patrickstar._dry_run.simulated_hardware import META
from patrickstar._dry_run.simulation import EngineFactory, Step, roofline, simulate
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.workload import Workload, Workloads
from patrickstar.config import Config

PLENTY = 64
"""Bytes of memory per parameter with which nothing has to move, on either tier."""
OF_ACTIVATIONS = 1 << 44
"""Bytes that activations won't exceed."""


class _OpCounter:
    """Counts operations, and the size of the matrices that they are done on."""

    def __init__(self, machine: Machine) -> None:
        self.costs = roofline(machine)
        self.operations = 0
        self.per_size = 0.0
        """Operations of matrix products, each over the smallest side of its matrices."""
        self.sized = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        found = operations(func, args, kwargs, out)
        self.operations += found
        size = matrix_size(args)
        if found and size:
            self.sized += found
            self.per_size += found / size
        return self.costs(func, args, kwargs, out)


def traced_workloads(
    make_engine: EngineFactory,
    build: Callable[[bool], nn.Module | Callable[[], nn.Module]],
    step_of: Callable[[int], Step],
    tokens_of: Callable[[int], int],
    machine: Machine,
) -> Workloads:
    """The work of a model by batch and checkpointing, each found by one rehearsed step.

    build: the model, with activation checkpointing or without. step_of: a step over so many sequences, which have
    `tokens_of` as many tokens. machine: its kind decides which kernels attention takes. Raises ModelError naming a
    module that can't be rehearsed.
    """

    @cache
    def workload(batch: int, checkpointing: bool) -> Workload:
        counted = _OpCounter(machine)
        seen: list[Any] = []
        step = step_of(batch)

        def watched(engine: Any) -> None:
            seen.append(engine)
            step(engine)

        model = build(checkpointing)
        if not isinstance(model, nn.Module):
            with META:
                model = model()
        # No chunk can be smaller than the largest parameter, and none need be larger.
        sizes = [param.numel() for param in model.parameters()]
        largest, numel = max(sizes, default=1), sum(sizes)
        config = Config(
            device="cpu",
            device_memory=PLENTY * numel + OF_ACTIVATIONS,
            host_memory=PLENTY * (numel + largest),
            chunk_size=largest,
        )
        found = simulate(make_engine, model, config, watched, machine, counted, steps=1)
        layout = seen[0].layout
        chunk_bytes = layout.chunk_numel * config.compute_dtype.itemsize
        used = [set(moment.chunks) for moment in found.trace.moments if moment.chunks]
        at_once = max((len(one | other) for one, other in pairwise(used)), default=1)
        size = counted.sized / counted.per_size if counted.per_size else 1
        return Workload(
            params=layout.numel,
            batch=batch,
            tokens=tokens_of(batch),
            checkpointing=checkpointing,
            operations=counted.operations,
            matrix_size=max(1, round(size)),
            non_model_bytes=found.trace.peak_non_model_bytes,
            working_bytes=at_once * chunk_bytes,
        )

    return workload
