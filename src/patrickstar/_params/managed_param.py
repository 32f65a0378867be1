"""One parameter of the user's model, its location in the chunks and its training state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from patrickstar._distributed.param_sharding import ParamSharding
from patrickstar._distributed.process_group import Processes
from patrickstar._layout.chunk_mapping import ParamLocation
from patrickstar._layout.schema import EXP_AVG_SQ, PARAM16, PARAM32, ParamSchema
from patrickstar._layout.shard_geometry import Box, memory_order
from patrickstar._params.param_state import ParamState
from patrickstar._params.row_gradient import RowGradient
from patrickstar._tiers.chunk import Chunk, Region
from patrickstar.errors import TrainingError


@dataclass(eq=False)
class ManagedParam:
    """A managed parameter. Compared by identity.

    Operators read the parameter at `region` of `chunk`. This rank's shard is at `location` in the chunk lists
    (`shard_chunk` for the compute dtype) and starts at element `shard_start` of the parameter. With one process the
    shard is the whole parameter and `shard_chunk` is `chunk`.
    """

    name: str
    param: nn.Parameter
    schema: ParamSchema
    location: ParamLocation
    chunk: Chunk
    region: Region
    shard_chunk: Chunk
    shard_start: int = 0
    embedding: bool = False
    """True if embedding lookups read the parameter; if only they do, its chunk holds nothing else."""
    tied: bool = False
    """True if other operators read it, too, as a head that is tied to the embedding."""
    on_host: bool = False
    """True if embedding lookups run on the host, where the weight remains, or a copy of one that is tied."""
    lookup_bytes: int = 0
    """Output bytes of differentiated lookups since the last step."""
    lookups_in_graph_bytes: int = 0
    """Output bytes of differentiated lookups since the last gradient of the parameter."""
    state: ParamState = field(init=False)
    observed: bool = False
    """True once this engine has updated the parameter, or started to."""
    steps: int = 0
    """Number of updates, with one that is running or deferred."""
    optimizer_extra: dict[str, Any] = field(default_factory=dict, repr=False)
    """Optimizer state outside the chunk lists: scalars, such as a step count."""
    original_class: type[nn.Parameter] = nn.Parameter
    """Class of the Parameter while it is not managed: a quantized one may have its own."""
    whole: Region | None = None
    """Shape and strides of the whole parameter, if it is a DTensor: the chunk holds its local tensor."""
    sharding: ParamSharding | None = None
    """With several processes: the part of the parameter that this process holds."""
    given_dtype: torch.dtype | None = None
    """Dtype of the values that the engine was given."""
    device_view: torch.Tensor | None = field(default=None, repr=False)
    absent_view: torch.Tensor = field(init=False, repr=False)
    """What the Parameter views while its values are not on the device. See [Note: placeholders]."""
    views: WeakValueDictionary[int, torch.Tensor] = field(default_factory=WeakValueDictionary, repr=False)
    """Views of the parameter, and its state_dict entry, by their ids. See [Note: assigned data]."""

    is_dtensor: bool = field(init=False)

    def __post_init__(self) -> None:
        self.state = ParamState(self.name)
        self.is_dtensor = self.whole is not None

    def __str__(self) -> str:
        return self.name

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Chunk lists of its optimizer states; none while it is frozen."""
        return self.schema.state_kinds

    @property
    def placements(self) -> Any:
        """Placements of a parameter that is a DTensor."""
        param: Any = self.param
        return param.placements

    @property
    def stays_on_host(self) -> bool:
        """True if an access reads the parameter on the host, without a transfer."""
        return self.on_host and not self.tied and self.chunk.host.valid and not self.chunk.device.valid

    @property
    def has_gradient(self) -> bool:
        """True if this rank's shard has a gradient for the next step."""
        return (self.overlays_shard or self.state.accumulated) and not self.state.update_pending

    @property
    def in_next_step(self) -> bool:
        """True if the parameter has a gradient for the next step on any rank, as of the last synchronization."""
        return self.state.ready if self.chunk.sharded else self.has_gradient

    def begin_update(self) -> None:
        """Count an update, and reserve the gradient for it until `LocalShards.end_update`."""
        self.count_update()
        self.state.update_pending = True

    def count_update(self) -> None:
        """Count an update that was started."""
        self.steps += 1
        self.observed = True

    @property
    def overlays_shard(self) -> bool:
        """True if a gradient that the update can use is stored in place of this rank's shard."""
        return self.state.reduced if self.chunk.sharded else self.state.overlays_param

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def full_kind(self) -> str:
        """Chunk list that holds the parameter in full precision: the master list, or `param16` if frozen."""
        return PARAM32 if self.schema.trained else PARAM16

    @property
    def full_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.schema.master_dtype) if self.schema.trained else self.chunk.dtype
        return dtype

    def restores(self, kind: str) -> bool:
        """Return whether elements of a list are restored from several ones ([Note: split masters])."""
        return self.schema.splits and kind in (PARAM32, EXP_AVG_SQ)

    @property
    def upper_kind(self) -> str:
        """List of the upper halves of this rank's masters, if these are split."""
        return self.shard_chunk.kind if self.schema.gradients_beside else self.schema.upper_kind

    @property
    def loses_digits(self) -> bool:
        """True if the parameter is frozen and was given in a dtype with more bits than its chunk has."""
        given = self.given_dtype if self.given_dtype is not None else self.chunk.dtype
        return not self.schema.trained and given.is_floating_point and given.itemsize > self.chunk.dtype.itemsize

    @property
    def row_major(self) -> bool:
        """True if the elements are in row-major order in memory."""
        return memory_order(self.shape, self.region.strides) == tuple(range(len(self.shape)))

    @property
    def shard_slice(self) -> slice:
        """This rank's shard as a slice of the parameter's elements in memory order."""
        return slice(self.shard_start, self.shard_start + self.location.numel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the chunk: of the local tensor of a DTensor."""
        return self.region.shape

    @property
    def layout_numel(self) -> int:
        """Elements that the layout reserves: those of the largest part, if the processes' parts differ in size."""
        return self.numel if self.sharding is None else self.sharding.numel

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.region.shape if self.whole is None else self.whole.shape

    @property
    def full_strides(self) -> tuple[int, ...]:
        """Strides of the whole parameter."""
        return self.region.strides if self.whole is None else self.whole.strides

    @property
    def parts(self) -> tuple[tuple[tuple[Box, Box], ...], ...]:
        """Parts of the parameter by rank, if it is a DTensor: see `ParamSharding`."""
        return self.sharding.parts if self.sharding is not None else ()

    @property
    def counts(self) -> bool:
        """True if this process counts its shard in norms: another group may hold the same part of a DTensor."""
        return self.sharding is None or self.sharding.owner_group

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a whole parameter's value."""
        return value if self.sharding is None else self.sharding.local(value)

    def assemble(self, part: torch.Tensor, world: Processes, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather the parts of a DTensor, of which this process holds `part`, on the host, in `out` if given."""
        assert self.sharding is not None, "with several processes every parameter has a sharding"
        if out is None:
            out = torch.empty_strided(self.full_shape, self.full_strides, dtype=part.dtype, device="cpu")
        self.sharding.assemble(part, out, world)
        return out

    def payload(self) -> torch.Tensor:
        """Return the parameter, or the gradient stored in its place, from an up-to-date copy of its chunk."""
        if self.chunk.device.valid and self.chunk.in_memory:
            return self.current_device_view()
        return self.chunk.current(self.region)

    def write_over(self, grad: torch.Tensor | RowGradient, *, add: bool) -> None:
        """Write a gradient over the parameter, or add it to the one that is there. Its chunk is in memory.

        Autograd then detects backwards that need the old values.
        """
        payload = self.payload()
        if add:
            payload.add_(grad.to_dense().to(payload.device))
        else:
            payload.copy_(grad) if isinstance(grad, torch.Tensor) else grad.write(payload)
        torch.autograd.graph.increment_version(self.param)

    def current_device_view(self) -> torch.Tensor:
        """Return a view of the device copy with its own version counter. See [Note: one storage for life]."""
        if self.device_view is None:
            self.device_view = self.chunk.on_device(self.region)
        return self.device_view

    @cached_property
    def meta_tensor(self) -> torch.Tensor:
        """The parameter's shape and strides without memory: its placeholder has other strides."""
        return torch.empty_strided(self.region.shape, self.region.strides, dtype=self.chunk.dtype, device="meta")

    def show_values(self) -> None:
        """Point the Parameter at its values, if they are there, without interception. See [Note: placeholders]."""
        view = self.absent_view
        if not self.state.overlays_param:
            if self.chunk.device.valid:
                view = self.current_device_view()
            elif self.on_host and self.stays_on_host:
                view = self.chunk.on_host(self.region)
        with torch._C.DisableTorchFunctionSubclass():
            self.set_data(view)

    def set_data(self, view: torch.Tensor) -> None:
        """Point the parameter, or the local tensor of a DTensor, at a tensor of its dtype and device."""
        if self.is_dtensor:
            param: Any = self.param
            param._local_tensor = view
        else:
            self.param.data = view

    def flat(self, chunk: Chunk, *, in_order: bool = False) -> torch.Tensor:
        """Return this rank's elements of the parameter in a chunk of one of its lists, 1-D, in memory order.

        `in_order`: see `Chunk.flat`.
        """
        return chunk.flat(self.location.offset, self.location.numel, in_order=in_order)

    def flattened(self, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, broadcast to the parameter's shape, as a 1-D tensor in the parameter's memory order."""
        value = value.expand(self.shape)
        if value.stride() != self.region.strides or value.numel() != self.numel:
            value = torch.empty_strided(self.shape, self.region.strides, dtype=value.dtype, device=value.device).copy_(
                value
            )
        return value.as_strided((self.numel,), (1,))


def check_not_updated(managed_params: Sequence[ManagedParam], backward_id: int | None) -> None:
    """Raise TrainingError if the backward that runs has updated one of these parameters.

    See [Note: updating before backward has ended]. `backward_id`: the backward's number, None if none runs.
    """
    updated = [managed for managed in managed_params if managed.state.updated_in_backward == backward_id]
    for managed in updated:
        managed.state.may_grow = True
    if updated:
        raise TrainingError(
            f"parameter {updated[0].name!r} is read, or its gradient grows, after it was updated in the same "
            f"backward; this did not happen in earlier steps. This step's update is incomplete. Later steps will "
            f"update this parameter in optimizer.step(). If steps differ in this way, leave out update=True in "
            f"engine.backward, or update=ps.InBackward() in ps.Config"
        )


NAMED = 3
"""Parameters that an error names if a view may be of any of them."""


def refusal(names: Sequence[str], *, whole: bool) -> str:
    """Return the error of native code that reads absent values of a parameter, or of a view of one of several."""
    named = ", ".join(map(repr, names[:NAMED])) + (f" or {len(names) - NAMED} others" if len(names) > NAMED else "")
    return (
        f"{'parameter' if whole else 'a view of parameter'} {named} is read outside of Python (in a TorchScript "
        f"function, a C++ extension, a kernel or a transform of torch.func) while its values are not on the device, or "
        f"its gradient is stored in their place: parameters are fetched for operators that Python calls. Pass a copy "
        f"to such code, as parameter.clone()"
    )
