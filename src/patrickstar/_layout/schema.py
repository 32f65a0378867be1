"""Parameter schemas: the chunk lists that a parameter has, with their dtypes.

`schema_for` is the only place that decides this. Other code must not branch on the optimizer or the dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

PARAM16 = "param16"
"""Parameter in its compute dtype (16 bits in mixed precision), which operators read; later its gradient."""
SHARD16 = "shard16"
"""With several processes: shard of a `param16` chunk that this rank owns; later its averaged gradient."""
NODE16 = "node16"
"""With replicas (nodes): shard of a `param16` chunk that this rank's replicate group owns."""
PARAM32 = "param32"
"""Master parameter that the optimizer updates."""
LOW16 = "low16"
"""Lower 16 bits of a master whose other bits are those of the parameter in bfloat16 ([Note: split masters])."""
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
EXP_AVG_8BIT = "exp_avg_8bit"
EXP_AVG_SQ_8BIT = "exp_avg_sq_8bit"
"""Codes of one byte for Adam's states."""
EMA = "ema"
"""Exponential moving average of the master."""
DELAYED16 = "delayed16"
"""Gradient of a delayed update; the update writes the new parameters over it."""
BUFFERED16 = "buffered16"
"""Newest values of a parameter whose updates are lock-free, on the host (Angel-PTM's buffered parameters)."""
BUFFERED_GRAD = "buffered_grad"
"""Sum of the gradients that no lock-free update has used yet, on the host (Angel-PTM's buffered gradients)."""
GRAD32 = "grad32"
"""Accumulated gradient. Part of a schema only if several processes have late updates; others create its chunks when
gradients are accumulated."""
KEPT32 = "kept32"
"""With several processes: gradients of whole chunks, accumulated on this rank and not yet reduced."""
SUM32 = "sum32"
"""With several processes: sum of the gradients of all ranks, before it is added to `grad32`, where it can't be in place
of the shard: in fp32, or beside a late update."""

HOST_ONLY = NODE16, KEPT32, SUM32, BUFFERED16, BUFFERED_GRAD
"""Lists that are never moved to disk."""

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1}
ITEMSIZE |= {"uint8": 1, "bool": 1}

COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Compute dtypes by the name of the precision."""


@dataclass(frozen=True)
class ListSpec:
    """Kind and dtype of one chunk list."""

    kind: str
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class ParamSchema:
    """Parallel chunk lists of a parameter, `param16` first."""

    lists: tuple[ListSpec, ...]
    buffers: tuple[ListSpec, ...] = ()
    """Lists that stay on the host, for late updates."""

    # Stored, because each update reads them.
    optimizer_lists: tuple[ListSpec, ...] = field(init=False, compare=False, repr=False)
    """Lists that only the optimizer step accesses."""
    state_lists: tuple[ListSpec, ...] = field(init=False, compare=False, repr=False)
    """Master and optimizer states."""
    state_kinds: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Kinds of the optimizer states' lists; none of a frozen parameter."""
    trained: bool = field(init=False, compare=False, repr=False)
    """True if the optimizer updates parameters of this schema."""
    master_dtype: str = field(init=False, compare=False, repr=False)
    """Dtype of gradient accumulation and of the update."""
    splits: bool = field(init=False, compare=False, repr=False)
    """True if masters are split: `low16`, the list `upper_kind` and marks in `exp_avg_sq` give them."""
    upper_kind: str = field(init=False, compare=False, repr=False)
    """List of the upper halves of split masters: the parameters, or their newest values if updates are lock-free."""
    gradients_beside: bool = field(init=False, compare=False, repr=False)
    """True if gradients are beside their parameters, in lists of their own: these are the upper halves of masters."""

    def __post_init__(self) -> None:
        assert self.lists[0].kind == PARAM16, "the first list of a schema must be param16"
        states = tuple(spec for spec in self.lists[1:] if spec.kind != DELAYED16)
        derived = {
            "optimizer_lists": self.lists[1:],
            "state_lists": states,
            "state_kinds": tuple(spec.kind for spec in states if spec.kind not in (PARAM32, LOW16)),
            "trained": len(self.lists) > 1,
            "splits": (splits := any(spec.kind == LOW16 for spec in states)),
            "upper_kind": (upper := BUFFERED16 if any(spec.kind == BUFFERED16 for spec in self.buffers) else PARAM16),
            "gradients_beside": splits and upper == PARAM16,
            "master_dtype": "float32" if splits else self.lists[:2][-1].dtype,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def compute(self) -> ListSpec:
        """List that operators read."""
        return self.lists[0]

    @property
    def delays(self) -> bool:
        """True if updates of parameters of this schema may be delayed."""
        return self.state_lists != self.optimizer_lists

    @property
    def gradient_dtype(self) -> str:
        """Dtype of gradients in a list of their own: the master's, unless each backward is updated with its own."""
        return self.compute.dtype if self.gradients_beside else self.master_dtype

    def gradient_itemsize(self, accumulates: bool) -> int:
        """Return the bytes per element of a gradient in a list of its own; 0 if it is in place of the parameter.

        `accumulates`: several backwards precede a step, whose gradients are summed in the master's dtype.
        """
        if not self.trained or not (accumulates or self.gradients_beside):
            return 0
        return ITEMSIZE[self.master_dtype] if accumulates else self.compute.itemsize

    @property
    def bytes_per_param(self) -> int:
        """Bytes of model data per element without padding: 14 for Adam in mixed precision, 2 if frozen in 16 bits."""
        return sum(spec.itemsize for spec in (*self.lists, *self.buffers))


ADAM_STATES = (EXP_AVG, EXP_AVG_SQ)
NO_DTYPES: Mapping[str, str] = MappingProxyType({})


def schema_for(
    dtype: str,
    trained: bool,
    states: tuple[str, ...] = ADAM_STATES,
    *,
    state_dtypes: Mapping[str, str] = NO_DTYPES,
    split: bool = False,
    delayed: bool = False,
    buffered: str | None = None,
    summed: str | None = None,
) -> ParamSchema:
    """Return the schema of a parameter with this compute dtype.

    A frozen parameter has `param16` only. A trained one also has the master and the optimizer's `states`.

    Args:
        state_dtypes: Dtypes of states that do not have the master's.
        split: Split the masters of parameters in bfloat16 that have `exp_avg_sq` ([Note: split masters]).
        delayed: Add a list for the gradients of a delayed update.
        buffered: Add the buffers of lock-free updates, with sums of gradients in "fp32" (the master's dtype) or in
            "16-bit" (the compute dtype).
        summed: Add a buffer for the sum of the gradients of all ranks, likewise, and the gradient list.
    """
    compute = ListSpec(PARAM16, dtype)
    if not trained:
        return ParamSchema((compute,))
    master = "float64" if dtype == "float64" else "float32"
    gradients = (ListSpec(DELAYED16, dtype),) if delayed else ()
    state_specs = (ListSpec(kind, state_dtypes.get(kind, master)) for kind in states)
    splits = split and dtype == "bfloat16" and EXP_AVG_SQ in states
    masters = ListSpec(LOW16, "int16") if splits else ListSpec(PARAM32, master)
    lists = (compute, masters, *state_specs, *gradients)
    sums = ((SUM32, summed), (GRAD32, summed and "fp32"), (BUFFERED_GRAD, buffered))
    buffers = tuple(ListSpec(kind, master if name == "fp32" else dtype) for kind, name in sums if name is not None)
    return ParamSchema(lists, buffers if buffered is None else (ListSpec(BUFFERED16, dtype), *buffers))
