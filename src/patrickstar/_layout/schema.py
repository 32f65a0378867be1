"""Chunk lists as data: which kinds of model data a parameter has, and in which dtype.

A scheme is a table entry. Another optimizer's states, a cheaper byte count or a list more is another entry in
`schema_for`, never a branch elsewhere.
"""

from dataclasses import dataclass

PARAM16 = "param16"
"""What operators read: the parameter in its compute dtype (16 bits in mixed precision), later its gradient."""
SHARD16 = "shard16"
"""With several processes, the part of a chunk of `param16` that one of them owns; later its averaged gradient."""
PARAM32 = "param32"
"""The master copy that the optimizer updates."""
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
GRAD32 = "grad32"
"""Accumulated gradients. It is not in a scheme: a chunk of it is made only when accumulation asks for it."""
KEPT32 = "kept32"
"""With several processes, gradients that one of them has added up by itself, of whole chunks."""
SUM32 = "sum32"
"""With several processes, a sum of all their gradients in fp32, on its way to `grad32`."""

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1}
ITEMSIZE |= {"uint8": 1, "bool": 1}


@dataclass(frozen=True)
class ListSpec:
    """One chunk list: its kind and the name of its dtype."""

    kind: str
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class ParamSchema:
    """The parallel lists that a run of parameters has, `param16` first."""

    lists: tuple[ListSpec, ...]

    def __post_init__(self) -> None:
        assert self.lists[0].kind == PARAM16, "operators read the first list"

    @property
    def compute(self) -> ListSpec:
        """The list that operators read."""
        return self.lists[0]

    @property
    def optimizer_lists(self) -> tuple[ListSpec, ...]:
        """The lists that only the update touches."""
        return self.lists[1:]

    @property
    def bytes_per_param(self) -> int:
        """Model data per parameter, padding aside: 14 for Adam in mixed precision, 2 for a frozen 16-bit one."""
        return sum(spec.itemsize for spec in self.lists)

    @property
    def trained(self) -> bool:
        """Whether the optimizer has states for these parameters."""
        return len(self.lists) > 1

    @property
    def master_dtype(self) -> str:
        """The dtype gradients are accumulated in and the update computes in."""
        return self.lists[1].dtype if self.trained else self.compute.dtype


ADAM_STATES = (EXP_AVG, EXP_AVG_SQ)


def schema_for(dtype: str, trained: bool, states: tuple[str, ...] = ADAM_STATES) -> ParamSchema:
    """The lists of a parameter that computes in `dtype`: `param16` alone if it is frozen.

    If it is trained, the master too, and the optimizer's `states`: Adam's, unless others are named.
    """
    compute = ListSpec(PARAM16, dtype)
    if not trained:
        return ParamSchema((compute,))
    master = "float64" if dtype == "float64" else "float32"
    return ParamSchema((compute, *(ListSpec(kind, master) for kind in (PARAM32, *states))))
