"""Workloads of arbitrary models, traced in a dry run on meta tensors."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from patrickstar._dry_run.op_tracer import OpCost, matrix_size, operations, unpacked_bytes
from patrickstar._dry_run.simulated_kernels import roofline
from patrickstar._dry_run.simulation import EngineFactory, Step, on_meta, simulate
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.workload import Workload, Workloads
from patrickstar.config import Config

AMPLE_BYTES_PER_PARAM = 64
"""Budget per parameter that makes transfers unnecessary, on either tier."""
AMPLE_ACTIVATION_BYTES = 1 << 44
"""More bytes than any model's activations need."""


class _OpCounter:
    """Cost model that also counts floating-point operations and matrix sizes."""

    def __init__(self, machine: Machine) -> None:
        self.costs = roofline(machine)
        self.operations = 0
        self.unpacked_bytes = 0
        """Bytes read and written to unpack parameters of 4 bits."""
        self.sized_operations = 0
        """Operations of matrix products with a known size."""
        self.operations_over_size = 0.0
        """Sum of their operations divided by their matrix size."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        count = operations(func, args, kwargs, out)
        self.operations += count
        self.unpacked_bytes += unpacked_bytes(func, args, kwargs, out)
        size = matrix_size(func, args)
        if count and size:
            self.sized_operations += count
            self.operations_over_size += count / size
        return self.costs(func, args, kwargs, out)


def _size(layout: Layout, trained: bool) -> tuple[int, int]:
    """Return the elements, and the bytes in their compute dtypes, of the parameters that are trained, or of others."""
    specs = {chunk.index: chunk.schema for chunk in layout.chunks if chunk.schema.trained is trained}
    located = [(each.numel, specs[each.chunk]) for each in layout.locations.values() if each.chunk in specs]
    return sum(numel for numel, _ in located), sum(numel * schema.compute.itemsize for numel, schema in located)


def traced_workloads(
    make_engine: EngineFactory,
    build: Callable[[bool], nn.Module | Callable[[], nn.Module]],
    step_of: Callable[[int], Step],
    tokens_of: Callable[[int], int],
    machine: Machine,
    fixed_bytes: int = 0,
) -> Workloads:
    """Return a function from (batch, checkpointing) to the workload of one dry-run step.

    Args:
        build: Returns the model, with or without activation checkpointing.
        step_of: Returns a step over a batch of the given number of sequences.
        tokens_of: Returns the number of tokens in such a batch.
        machine: Decides by its type which attention kernels are used.
        fixed_bytes: Bytes of the model on the device that are no parameters, such as quantization constants.

    Raises:
        ModelError: A module cannot run on meta tensors; the message names it.
    """

    @cache
    def workload(batch: int, checkpointing: bool) -> Workload:
        counter = _OpCounter(machine)
        engines: list[Any] = []
        step = step_of(batch)

        def recorded_step(engine: Any) -> None:
            engines.append(engine)
            step(engine)

        model = on_meta(build(checkpointing))
        # The smallest possible chunks: those that hold the largest parameter.
        sizes = [param.numel() for param in model.parameters()]
        largest, numel = max(sizes, default=1), sum(sizes)
        config = Config(
            device="cpu",
            precision=machine.precision,
            device_memory=AMPLE_BYTES_PER_PARAM * numel + AMPLE_ACTIVATION_BYTES,
            host_memory=AMPLE_BYTES_PER_PARAM * (numel + largest),
            chunk_size=largest,
        )
        report = simulate(make_engine, model, config, recorded_step, machine, counter, steps=1)
        layout = engines[0].layout
        nbytes = {chunk.index: chunk.compute_bytes for chunk in layout.chunks}
        used = [set(moment.chunks) for moment in report.trace.moments if moment.chunks]
        working = (sum(nbytes[index] for index in chunks | following) for chunks, following in pairwise(used))
        trained, frozen = (_size(layout, trained) for trained in (True, False))
        size = counter.sized_operations / counter.operations_over_size if counter.operations_over_size else 1
        return Workload(
            params=trained[0],
            batch=batch,
            tokens=tokens_of(batch),
            checkpointing=checkpointing,
            operations=counter.operations,
            matrix_size=max(1, round(size)),
            non_model_bytes=report.trace.peak_non_model_bytes + fixed_bytes,
            working_bytes=max(working, default=max(nbytes.values())),
            param_bytes=trained[1] / trained[0],
            frozen_params=frozen[0],
            frozen_bytes=frozen[1],
            unpacked_bytes=counter.unpacked_bytes,
        )

    return workload
