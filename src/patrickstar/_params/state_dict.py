"""Read and write parameters and buffers by name, in full precision."""

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._distributed.param_sharding import whole_value
from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._layout.schema import BUFFERED16, EXP_AVG_SQ, LOW16, PARAM16, PARAM32, SHARD16
from patrickstar._params.interception import release_parameter
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.param_values import replace_data
from patrickstar._params.several_processes import Sharing
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.errors import DiskError, ModelError, MoveError, TrainingError

FULL_PRECISION = PARAM16, SHARD16, PARAM32, LOW16
"""Lists of which parameters are read in full precision."""
OF_SPLIT = EXP_AVG_SQ, BUFFERED16
"""Further lists from which split masters are restored."""


class ModelState:
    """Reads, writes and finally releases the model state held in chunks, on any tier."""

    def __init__(self, module: nn.Module, sharing: Sharing) -> None:
        self.module = module
        self.shards, self.sharing = sharing.shards, sharing
        self.keep_values = self.shards.manager.device.type != "meta"
        """True if `release` preserves the parameters' values. A dry run has none."""
        self.synchronized = False
        """With several processes: True if all of them have synchronized for `release`."""
        self.torn: set[ManagedParam] = set()
        """Parameters of whose split masters a failed disk has lost halves: they are read as they are rounded."""
        self.process = os.getpid()
        """Id of the process that owns the chunks. See [Note: memory excluded from fork]."""

    def read(self, managed: ManagedParam, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a host copy of a whole parameter in list `kind`, all-gathered from all ranks, in `out` if given.

        If this rank's shard can't be read, NaN is gathered in its place and the error is raised.
        """
        interruption_point()
        if not managed.parts:
            return self.read_local(managed, kind, out)
        return managed.assemble(self.read_local(managed, kind), self.shards.world, out)

    def read_local(self, managed: ManagedParam, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a host copy as `read`; of a DTensor only the local tensor."""
        kind = managed.shard_chunk.kind if kind == PARAM16 else kind
        value = out
        if value is None:
            dtype = self.shards.dtype_of(managed, kind)
            value = torch.empty_strided(managed.shape, managed.region.strides, dtype=dtype, device="cpu")
        flat = value.as_strided((managed.numel,), (1,))
        own = flat[managed.shard_slice]
        try:
            parts = self.shards.parts(managed, kind)
            if managed in self.torn and kind == managed.full_kind:
                parts = self.shards.stored_parts(managed, managed.upper_kind)
            for part_slice, part in parts if managed.location.numel else ():
                own[part_slice].copy_(part)
        except (DiskError, MoveError, TrainingError):
            own.fill_(float("nan"))
            self.sharing.gather_parts(managed, flat)  # the other ranks already wait in this collective
            raise
        self.sharing.gather_parts(managed, flat)
        return value

    def write(self, managed: ManagedParam, kind: str, value: torch.Tensor) -> None:
        """Replace a whole parameter in list `kind` by a value of its shape, or that is broadcast to it.

        All processes must call this together if the value is a DTensor.
        """
        value = whole_value(value)
        if not managed.location.numel:
            return
        kind = managed.shard_chunk.kind if kind == PARAM16 else kind
        flat = managed.flattened(managed.local(value.expand(managed.full_shape)))[managed.shard_slice]
        for part_slice, part in self.shards.parts(managed, kind, write=True):
            part.copy_(flat[part_slice])

    def full_precision(self, managed: ManagedParam) -> torch.Tensor:
        """Return a host copy of a parameter's master, or of the parameter itself if it is frozen."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self.read(managed, managed.full_kind)

    def pieces(self, managed: ManagedParam) -> Iterator[torch.Tensor]:
        """Yield a parameter's full-precision elements in row-major order, without a copy where possible.

        Elements on disk are yielded page by page. With several processes the whole parameter is all-gathered.
        """
        if managed.row_major and self.shards.world.size == 1:
            for _, part in self.shards.parts(managed, managed.full_kind) if managed.numel else ():
                interruption_point()
                yield part
        else:
            yield self.full_precision(managed).contiguous().view(-1)

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the model's state on the host, or only `names` of it; tied names share one tensor."""
        entries = self.entries()
        if names is not None:
            if unexpected := set(names) - entries.keys():
                raise ModelError(f"the model's state has no entry named {', '.join(map(repr, sorted(unexpected)))}")
            entries = {name: tensor for name, tensor in entries.items() if name in names}
        values: dict[ManagedParam, torch.Tensor] = {}
        state = {}
        for name, tensor in entries.items():
            managed = managed_param_of(tensor)
            if managed is None:
                is_tensor = isinstance(tensor, torch.Tensor)
                state[name] = tensor.detach().cpu().clone() if is_tensor else copy.deepcopy(tensor)
                continue
            if managed not in values:
                values[managed] = self.full_precision(managed)
            state[name] = values[managed]
        return state

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load a state dict. Nothing is changed unless all names (if `strict`) and shapes match."""
        own = self.entries()
        missing, unexpected = own.keys() - state_dict.keys(), state_dict.keys() - own.keys()
        if not strict:
            own = {name: value for name, value in own.items() if name not in missing}
            missing = set()
        tensors = {name for name, value in own.items() if isinstance(value, torch.Tensor)} & state_dict.keys()
        mismatched = [name for name in tensors if own[name].shape != state_dict[name].shape]
        if missing or unexpected or mismatched:
            raise ModelError(
                f"the state dict does not match the model, nothing was loaded: missing {sorted(missing)}, "
                f"unexpected {sorted(unexpected)}, different shape {sorted(mismatched)}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                interruption_point()
                managed = managed_param_of(tensor)
                if not isinstance(tensor, torch.Tensor):
                    self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(copy.deepcopy(state_dict[name]))
                elif managed is None:
                    tensor.copy_(state_dict[name])
                else:
                    self.assign(managed, state_dict[name])
        self.sharing.drop_gathered()

    def release(self) -> list[str]:
        """Free all chunks; parameters become plain ones on the host, in full precision.

        Returns the names of parameters that a disk or thread failure made unreadable; they are filled with NaN.
        """
        manager = self.shards.manager
        self.shards.closed = True
        try:
            return self._release_chunks(manager)
        finally:
            manager.close()
            manager.host_tier.unlock()

    def _release_chunks(self, manager: ChunkManager) -> list[str]:
        lost = []
        for managed in self.shards.managed_params:
            release_parameter(managed)
        with suppress(RuntimeError):  # of a failed device; then what is freed makes no room for the plain parameters
            manager.host_tier.unlock()
        for chunk in list(manager.chunks.values()):
            params = self.shards.by_chunk.get(chunk.index, ())
            restores = chunk.kind in OF_SPLIT and any(managed.schema.splits for managed in params)
            if chunk.kind not in FULL_PRECISION and not restores:
                manager.remove(chunk, for_good=True)
        for index, managed_params in self.shards.by_chunk.items():
            interruption_point()
            for managed in managed_params:
                value = self._try_read(managed) if self.keep_values else None
                if value is None:
                    lost.append(managed.name)
                    value = self.shards.placeholder(managed.chunk.dtype).expand(managed.shape)
                replace_data(managed.param, value)
                managed.device_view = None
            for kind in (*FULL_PRECISION, *OF_SPLIT):
                if (kind, index) in manager.chunks:
                    manager.remove(manager[kind, index], for_good=True)
        if self.synchronized:
            lost = self._lost_on_any_rank(lost)
        return lost

    def _lost_on_any_rank(self, lost: list[str]) -> list[str]:
        """Return the parameters that any rank has lost, after filling them with NaN on this rank too."""
        names = set().union(*self.shards.world.all_gather_object(lost))
        for managed in self.shards.managed_params:
            if managed.name in names and managed.name not in lost:
                replace_data(managed.param, self.shards.placeholder(managed.chunk.dtype).expand(managed.shape))
        return [managed.name for managed in self.shards.managed_params if managed.name in names]

    def _try_read(self, managed: ManagedParam) -> torch.Tensor | None:
        if self.shards.world.size > 1 and not self.synchronized:
            return None
        try:
            return self.read_local(managed, managed.full_kind)
        except (DiskError, MoveError, TrainingError):
            return None

    def entries(self) -> dict[str, Any]:
        """Return the entries of `nn.Module.state_dict`: parameters, persistent buffers, extra state."""
        entries: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return entries

    def assign(self, managed: ManagedParam, value: torch.Tensor) -> None:
        """Set a parameter and its master; see `write`."""
        with torch._C.DisableTorchFunctionSubclass():
            value = whole_value(value)
            self.write(managed, PARAM16, value)
            torch.autograd.graph.increment_version(managed.param)
            if managed.schema.trained:
                self.write(managed, PARAM32, value)
