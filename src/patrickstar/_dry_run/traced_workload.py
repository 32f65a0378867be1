"""Workloads of arbitrary models, traced in a dry run on meta tensors."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from patrickstar._dry_run.op_tracer import OpCost, matrix_size, operations, touched_bytes
from patrickstar._dry_run.packed_products import unpacked_bytes
from patrickstar._dry_run.simulated_kernels import limited_by_traffic, roofline
from patrickstar._dry_run.simulation import QUANT_STATE, EngineFactory, Step, constants_bytes, on_meta, simulate
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.tiling import NOT_TILED, Tiling
from patrickstar._perf_model.transformer_shape import Checkpointing
from patrickstar._perf_model.workload import PRODUCTS_ONLY, Workload
from patrickstar._schedule.trace import Trace
from patrickstar.config import Config

AMPLE_BYTES_PER_PARAM = 64
"""Budget per parameter that makes transfers unnecessary, on either tier."""
AMPLE_ACTIVATION_BYTES = 1 << 44
"""More bytes than any model's activations need."""


class _OpCounter:
    """Cost model that also counts floating-point operations and matrix sizes."""

    def __init__(self, machine: Machine) -> None:
        self.costs, self._machine = roofline(machine), machine
        self.operations = 0
        self.thin_operations = 0
        self.other_bytes = 0
        """Operations and bytes of operators that take the time of their memory traffic."""
        self.sized_operations = 0
        """Operations of matrix products with a known size."""
        self.operations_over_size = 0.0
        """Sum of their operations divided by their matrix size."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        count, nbytes = operations(func, args, kwargs, out), touched_bytes(args, kwargs, out)
        self.operations += count
        if limited_by_traffic(self._machine, count, nbytes):
            self.other_bytes += nbytes
            self.thin_operations += count
            return self.costs(func, args, kwargs, out)
        self.other_bytes += unpacked_bytes(func, args)
        size = matrix_size(func, args)
        if count and size:
            self.sized_operations += count
            self.operations_over_size += count / size
        return self.costs(func, args, kwargs, out)


def _compute_bytes(layout: Layout, trained: bool) -> int:
    """Return the bytes in their compute dtypes, of the parameters that are trained, or of the others."""
    sizes = {each.index: each.schema.compute.itemsize for each in layout.chunks if each.schema.trained is trained}
    return sum(each.numel * sizes.get(each.chunk, 0) for each in layout.locations.values())


def device_bytes(trace: Trace, nbytes: Mapping[int, int]) -> int:
    """Return the most bytes of non-model data, of the chunks in use and of those used next that one moment has."""
    needed, following = 0, frozenset[int]()
    for moment in reversed(trace.moments):
        chunks = frozenset(moment.chunks)
        needed = max(needed, moment.non_model_bytes + sum(nbytes[index] for index in chunks | following))
        following = chunks or following
    return needed


def _numel(param: nn.Parameter) -> int:
    """Return the elements of a parameter; those of 4 bits are packed, two in a byte."""
    constants = vars(param).get(QUANT_STATE)
    return param.numel() if constants is None else int(constants.shape.numel())


def traced_workloads(
    make_engine: EngineFactory,
    build: Callable[[], nn.Module],
    step_of: Callable[[int], Step],
    tokens_of: Callable[[int], int],
    machine: Machine,
    tiling: Tiling = NOT_TILED,
) -> Callable[[int, Checkpointing], Workload]:
    """Return a function from (batch, checkpointing) to the workload of one dry-run step.

    Args:
        build: Builds the model; called on the meta device.
        step_of: Returns a step over a batch of the given number of sequences.
        tokens_of: Returns the number of tokens in such a batch.
        machine: Decides by its type which attention kernels are used.
        tiling: What is computed by tiles of tokens.

    Raises:
        ModelError: A module cannot run on meta tensors; the message names it.
    """

    @cache
    def workload(batch: int, checkpointing: Checkpointing) -> Workload:
        counter = _OpCounter(machine)
        engines: list[Any] = []
        step = step_of(batch)

        def recorded_step(engine: Any) -> None:
            engines.append(engine)
            counter.other_bytes = 0  # what the engine's construction takes is not of the step
            step(engine)

        model = on_meta(build)
        trained_params, frozen_params = (
            sum(_numel(param) for param in model.parameters() if param.requires_grad is trained)
            for trained in (True, False)
        )
        # On a GPU the trace has the constants, on a CPU they are outside of all budgets.
        outside_bytes = constants_bytes(model) if machine.gpu is None else 0
        # The smallest possible chunks: those that hold the largest parameter.
        sizes = [param.numel() for param in model.parameters()]
        largest, numel = max(sizes, default=1), sum(sizes)
        config = Config(
            device="cpu",
            precision=machine.precision,
            device_memory=AMPLE_BYTES_PER_PARAM * numel + AMPLE_ACTIVATION_BYTES,
            host_memory=AMPLE_BYTES_PER_PARAM * (numel + largest),
            chunk_size=largest,
            activation_checkpointing=checkpointing or None,
            **tiling._asdict(),
        )
        report = simulate(make_engine, model, config, recorded_step, machine, counter, steps=1)
        layout = engines[0].layout
        nbytes = {chunk.index: chunk.compute_bytes for chunk in layout.chunks}
        used = [set(moment.chunks) for moment in report.trace.moments if moment.chunks]
        working = [sum(nbytes[index] for index in chunks | following) for chunks, following in pairwise(used)]
        trained_bytes, frozen_bytes = (_compute_bytes(layout, trained) for trained in (True, False))
        size = counter.sized_operations / counter.operations_over_size if counter.operations_over_size else 1
        return Workload(
            params=trained_params,
            batch=batch,
            tokens=tokens_of(batch),
            checkpointing=PRODUCTS_ONLY if checkpointing == "products" else float(checkpointing),
            operations=counter.operations,
            matrix_size=max(1, round(size)),
            non_model_bytes=report.trace.peak_non_model_bytes + outside_bytes,
            working_bytes=max(working, default=max(nbytes.values())),
            peak_working_bytes=device_bytes(report.trace, nbytes) - report.trace.peak_non_model_bytes,
            param_bytes=trained_bytes / trained_params,
            frozen_params=frozen_params,
            frozen_bytes=frozen_bytes,
            other_bytes=counter.other_bytes,
            thin_operations=counter.thin_operations,
        )

    return workload
