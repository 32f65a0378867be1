"""Workload of one training step, the input of the performance model, from the analytic costs of a transformer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from patrickstar._perf_model.collective_costs import all_reduce_bytes, exchange_bytes
from patrickstar._perf_model.experts import Experts, expected_maximum
from patrickstar._perf_model.mesh import ONE_PROCESS, Mesh
from patrickstar._perf_model.transformer_shape import GRADIENT_TRAFFIC, HALF, SINGLE, Checkpointing, TransformerShape
from patrickstar.errors import ConfigError

PARAM_BYTES = 2
"""Bytes of a parameter in a 16-bit compute dtype; its gradient reuses the same memory."""
STATE_BYTES = 12
"""Bytes of a parameter's fp32 master copy and two optimizer moments."""
LOCK_FREE_BYTES = 6
"""Host bytes of a parameter's buffers for lock-free updates: its newest value, and an fp32 sum of gradients."""

UPDATE_BYTES = 2 * PARAM_BYTES + 2 * STATE_BYTES
"""Bytes per parameter that an update in mixed precision reads and writes."""

ROUTED_BYTES = 2 * HALF
"""Bytes that a routed token saves per hidden unit: input and output of its expert."""


@dataclass(frozen=True)
class ExpertLoad:
    """Work of the experts in one process, and the exchange of tokens with the other processes of its group."""

    params: int
    """Elements of the experts that the process computes with."""
    operations: float
    """Operations of a step at the mean load."""
    matrix_size: int
    """Smallest side of the experts' matrix products."""
    imbalance: float
    """Load of the busiest process relative to the mean."""
    exchanges: int
    """All-to-alls of a step; 0 without expert parallelism."""
    exchanged_bytes: float
    """Bytes that the process sends in all of them."""


@dataclass(frozen=True)
class Workload:
    """Workload of one step of one process."""

    params: int
    """Trained elements that the process computes with; those of experts in `experts` are not among them."""
    batch: int
    """Number of sequences."""
    tokens: int
    checkpointing: float
    """Share of the layers that are recomputed in backward in whole; the others then store what their products return.
    0: all activations are stored."""
    operations: float
    matrix_size: int
    """Typical smallest side of matrix products; larger products are faster."""
    non_model_bytes: int
    """Peak non-model data on the device: saved activations and operator workspace."""
    working_bytes: int
    """Parameters needed on the device at once: those of two layers, one in use and one in transfer."""
    tensor_parallel_bytes: float = 0
    """Bytes that the process sends in tensor-parallel collectives, which computation waits for."""
    experts: ExpertLoad | None = None
    """Experts, if the model has some."""
    model_params: int | None = None
    """Parameters of the whole model, if a process computes with only a part."""
    param_bytes: float = PARAM_BYTES
    """Bytes of a trained parameter in the compute dtype, on average."""
    frozen_params: int = 0
    """Elements of frozen parameters, which have no gradients, masters and states."""
    frozen_bytes: int = 0
    """Bytes of frozen parameters, as operators read them."""
    other_bytes: int = 0
    """Bytes of operators on the device that take the time of their memory traffic, as far as they are known."""
    thin_operations: float = 0
    """Operations among them: products of long and thin matrices."""
    peak_working_bytes: int | None = None
    """Parameters needed at once beside the peak of non-model data, as far as it is known: else `working_bytes`."""
    offloaded: float = 0.0
    """Share of the saved activations that is on the host between forward and backward. Their copies do not count."""
    splits_masters: bool = False
    """True if parameters in bfloat16 are the upper halves of their masters: updates in backward, or lock-free ones."""

    @property
    def state_bytes(self) -> float:
        """Bytes of a parameter's states and master, or of what its master has beside the parameter, on average."""
        return STATE_BYTES - (SINGLE - self.param_bytes if self.splits_masters else 0)

    @property
    def update_bytes(self) -> float:
        """Bytes per parameter that an update reads and writes: gradient, parameter (as the upper half, too), states."""
        return (3 if self.splits_masters else 2) * self.param_bytes + 2 * self.state_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that the device needs at least: non-model data, and parameters in use."""
        beside = self.working_bytes if self.peak_working_bytes is None else self.peak_working_bytes
        return self.non_model_bytes + beside

    @property
    def process_params(self) -> int:
        """Trained elements that the process computes with."""
        return self.params + (self.experts.params if self.experts is not None else 0)

    @property
    def all_params(self) -> int:
        """Parameters of the whole model, trained and frozen."""
        return self.params + self.frozen_params if self.model_params is None else self.model_params

    @property
    def trained_params(self) -> int:
        """Parameters of the whole model that are trained."""
        return self.all_params - self.frozen_params

    @property
    def all_operations(self) -> float:
        """Operations of the process, those of experts at the mean load."""
        return self.operations + (self.experts.operations if self.experts is not None else 0)

    @property
    def fill_share(self) -> float:
        """Fraction of the transfers that cannot overlap with computation: the first and last working sets."""
        return min(1.0, self.working_bytes / (self.param_bytes * self.process_params + self.frozen_bytes))

    @property
    def working_sets(self) -> int:
        """Number of layers that the parameters would fill, each half a working set."""
        return math.ceil(2 / self.fill_share)


Workloads = Callable[[int, float, Mesh], Workload]
"""Function from (sequences per process, share of recomputed layers, mesh) to the workload of one process.

With a share above 0, layers that are not recomputed in whole store what their products return; with 0 they store all.
"""


PRODUCTS_ONLY = 2.0**-20
"""Share of recomputed layers that rounds to none: all of them store what their products return."""
RECOMPUTED = (1.0, PRODUCTS_ONLY, 0.0)
"""Candidate shares: all layers are recomputed in whole, all store their products, all store everything."""


def option_of(share: float) -> float | Literal["products"]:
    """Return the value of `Config.activation_checkpointing` for a share of recomputed layers."""
    return "products" if share == PRODUCTS_ONLY else share


def _with_costs(work: Workload, share: float, of: Callable[[str], float], non_model_bytes: int) -> Workload:
    """Return a workload with another share of recomputed layers, and its costs by their names."""
    return replace(
        work,
        checkpointing=share,
        operations=of("operations"),
        thin_operations=of("thin_operations"),
        other_bytes=round(of("other_bytes")),
        non_model_bytes=non_model_bytes,
    )


def with_products(
    whole: Callable[[int, Checkpointing], Workload],
) -> Callable[[int, Checkpointing], Workload]:
    """Return workloads of which those that store products are traced for the first batch alone.

    A trace takes a second. For other batches each of their figures lies between those of storing all and of storing
    inputs, where it does for the first one.
    """
    traced: list[int] = []

    def workload(batch: int, checkpointing: Checkpointing) -> Workload:
        if checkpointing != "products":
            return whole(batch, checkpointing)
        traced.append(batch)
        if batch == (first := traced[0]):
            return whole(batch, checkpointing)
        stored, recomputed = whole(batch, False), whole(batch, True)

        def of(name: str) -> float:
            most, found, least = (getattr(whole(first, way), name) for way in (False, "products", True))
            share = (found - least) / (most - least) if most != least else 0.0
            return float(getattr(recomputed, name) + share * (getattr(stored, name) - getattr(recomputed, name)))

        return _with_costs(recomputed, PRODUCTS_ONLY, of, math.ceil(of("non_model_bytes")))

    return workload


def of_shares(whole: Callable[[int, Checkpointing, Mesh], Workload]) -> Workloads:
    """Return workloads with a share of the layers recomputed in whole, while the others store their products.

    They are on the line between those with no and with all layers recomputed in whole.
    """

    def workload(batch: int, share: float, mesh: Mesh) -> Workload:
        recomputed = whole(batch, share > 0, mesh)
        if share in (0, 1):
            return recomputed
        stored = whole(batch, "products", mesh)
        if share == PRODUCTS_ONLY:
            return stored

        def between(name: str) -> float:
            least, most = getattr(stored, name), getattr(recomputed, name)
            return float(least + share * (most - least))

        beside = recomputed.device_bytes - recomputed.non_model_bytes
        return _with_costs(recomputed, share, between, math.ceil(between("device_bytes")) - beside)

    return workload


def splitting(workloads: Workloads) -> Workloads:
    """Return workloads with split masters."""
    return lambda batch, recomputed, mesh: replace(workloads(batch, recomputed, mesh), splits_masters=True)


def offloading(workloads: Workloads, share: float) -> Workloads:
    """Return workloads of which a share of what layers store beside their input is on the host until backward."""

    def workload(batch: int, recomputed: float, mesh: Mesh) -> Workload:
        work = workloads(batch, recomputed, mesh)
        stored = max(0, work.device_bytes - workloads(batch, 1.0, mesh).device_bytes)
        return replace(work, offloaded=share, non_model_bytes=work.non_model_bytes - math.floor(share * stored))

    return workload


def on_lines(workloads: Workloads) -> Workloads:
    """Return workloads with the memory of batches between two powers of two on the line between these.

    Each further batch of a model that is traced takes a second, and its memory is proportional to the batch, but for a
    constant part.
    """

    def workload(batch: int, checkpointing: float, mesh: Mesh) -> Workload:
        power = 1 << (batch.bit_length() - 1)
        smaller = workloads(power, checkpointing, mesh)
        if batch == power:
            return smaller
        more = workloads(2 * power, checkpointing, mesh).device_bytes - smaller.device_bytes
        grown = math.ceil(more * (batch / power - 1))
        return replace(smaller, batch=batch, non_model_bytes=smaller.non_model_bytes + grown)

    return workload


def shape_workload(
    shape: TransformerShape, batch: int, checkpointing: Checkpointing = True, mesh: Mesh = ONE_PROCESS
) -> Workload:
    """Return the workload of one process for `batch` sequences, with fused attention, which saves no scores.

    Tokens are those of one stack: the encoder and the decoder of a T5 each process as many.

    Raises:
        ConfigError: The mesh does not divide the model.
    """
    _check_division(shape, mesh)
    tokens, tp = batch * shape.sequence, mesh.tp
    experts = _expert_load(shape, tokens, bool(checkpointing), mesh) if shape.expert_layers else None
    saved_by_experts = _saved_by_experts(shape, tokens, mesh, experts) if experts is not None else 0
    sums = shape.all_reduces(bool(checkpointing), exchanged=mesh.ep > 1)
    layer_part = shape.layer_part(tp) + (experts.params // shape.expert_layers if experts is not None else 0)
    return Workload(
        params=shape.dense_numel(tp),
        batch=batch,
        tokens=tokens,
        checkpointing=PRODUCTS_ONLY if checkpointing == "products" else checkpointing,
        operations=shape.dense_operations(tokens, checkpointing not in (False, "products"), tp),
        matrix_size=min(shape.hidden // tp, tokens),
        non_model_bytes=round(
            shape.activation_bytes(batch, checkpointing, tp, saved_by_experts) + shape.logit_bytes(batch, tp)
        ),
        working_bytes=2 * PARAM_BYTES * layer_part,
        tensor_parallel_bytes=sums * all_reduce_bytes(tokens * shape.hidden, tp),
        experts=experts,
        model_params=shape.numel,
        other_bytes=round(
            shape.traffic_bytes(batch, bool(checkpointing), tp, saved_by_experts)
            + (GRADIENT_TRAFFIC * experts.params if experts is not None else 0)
        ),
    )


def _check_division(shape: TransformerShape, mesh: Mesh) -> None:
    for name, size in (("heads", shape.heads), ("hidden units", shape.hidden), ("units", shape.feed_forward.ffn)):
        if size % mesh.tp:
            where = " of the feed-forward network" if name == "units" else ""
            raise ConfigError(f"tp={mesh.tp} does not divide the model's {size} {name}{where}; try a divisor of {size}")
    if mesh.ep > 1 and shape.experts is None:
        raise ConfigError(f"ep={mesh.ep}: the model has no experts; try ep=1")
    if shape.experts is not None and shape.experts.count % mesh.ep:
        count = shape.experts.count
        raise ConfigError(f"ep={mesh.ep} does not divide the model's {count} experts; try a divisor of {count}")


def _expert_load(shape: TransformerShape, tokens: int, checkpointing: bool, mesh: Mesh) -> ExpertLoad:
    """Return the load of the experts in one process.

    Without expert parallelism, tensor parallelism divides each expert. With it, a process has whole experts, and the
    processes of a tensor-parallel group, which have the same tokens, route an equal part each.
    """
    assert shape.experts is not None
    passes, layers = 4 if checkpointing else 3, shape.expert_layers
    parts = mesh.tp if mesh.ep == 1 else 1
    routed = tokens * shape.experts.top_k / (mesh.tp // parts)
    # To the experts and back: in forward, again for recomputation, and in backward.
    exchanges = (6 if checkpointing else 4) * layers if mesh.ep > 1 else 0
    return ExpertLoad(
        params=layers * shape.experts.count // mesh.ep * shape.feed_forward.numel(parts),
        operations=passes * layers * shape.experts.top_k * shape.feed_forward.operations(tokens) / mesh.tp,
        matrix_size=max(1, min(shape.hidden // parts, round(routed * mesh.ep / shape.experts.count))),
        imbalance=_imbalance(shape.experts, routed, mesh),
        exchanges=exchanges,
        exchanged_bytes=exchanges * exchange_bytes(routed, shape.hidden, mesh.ep),
    )


def _imbalance(experts: Experts, routed: float, mesh: Mesh) -> float:
    """Return the load of the busiest process relative to the mean, `routed` tokens: its buffer, or what is expected."""
    if experts.capacity_factor is not None:
        return experts.capacity_factor
    return expected_maximum(routed, mesh.processes) / routed if mesh.ep > 1 else 1.0


def _saved_by_experts(shape: TransformerShape, tokens: int, mesh: Mesh, experts: ExpertLoad) -> float:
    """Return the bytes that the experts of one layer, and their router, save for backward in the busiest process."""
    assert shape.experts is not None
    parts = mesh.tp if mesh.ep == 1 else 1
    routed = tokens * shape.experts.top_k / (mesh.tp // parts) * experts.imbalance
    probabilities = SINGLE * tokens * shape.experts.count
    return routed * (ROUTED_BYTES * shape.hidden + shape.feed_forward.saved_bytes(parts)) + probabilities
