"""Parameters, buffers and optimizer states by name, in full precision."""

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar._layout.schema import PARAM16, PARAM32, SHARD16
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.tensor_subclass import managed_param_of, release_parameter
from patrickstar.errors import DiskError, ModelError, MoveError, TrainingError


class ModelState:
    """Reads and writes what the chunks of a model hold, wherever it lies."""

    def __init__(self, module: nn.Module, data: ModelData) -> None:
        self.module = module
        self.data = data
        self.keep_values = True
        """Whether `release` leaves parameters their values."""
        self.synchronized = False
        """Whether all processes are here for that, if there are several."""
        self.process = os.getpid()
        """The process that has the chunks. See [Note: memory excluded from fork]."""

    def read(self, managed: ManagedParam, kind: str) -> torch.Tensor:
        """A copy, on the host, of a parameter in a list; of several processes each gives its part."""
        kind = managed.shard_chunk.kind if kind == PARAM16 else kind
        chunk = self.data.manager[kind, managed.location.chunk]
        found = torch.empty_strided(managed.shape, managed.region.strides, dtype=chunk.dtype, device="cpu")
        flat = found.as_strided((managed.numel,), (1,))
        own = flat[managed.shard_slice]
        try:
            for where, part in self.data.parts(managed, kind) if managed.location.numel else ():
                own[where].copy_(part)
        except (DiskError, MoveError, TrainingError):
            own.fill_(float("nan"))
            self.data.gather_parts(managed, flat)  # the others have come for it
            raise
        self.data.gather_parts(managed, flat)
        return found

    def write(self, managed: ManagedParam, kind: str, value: torch.Tensor) -> None:
        """Set this process's part of a parameter in a list."""
        if not managed.location.numel:
            return
        kind = managed.shard_chunk.kind if kind == PARAM16 else kind
        flat = managed.flattened(value)[managed.shard_slice]
        for where, part in self.data.parts(managed, kind, write=True):
            part.copy_(flat[where])

    def full_precision(self, managed: ManagedParam) -> torch.Tensor:
        """A copy of a parameter on the host: of its master, or of itself if it is frozen."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self.read(managed, managed.full_kind)

    def pieces(self, managed: ManagedParam) -> Iterator[torch.Tensor]:
        """The same, its elements in a row in the order of its shape, without a copy where none is needed.

        What lies on disk comes a page at a time; of several processes' parts one parameter is put together.
        """
        if managed.row_major and self.data.comm is None:
            for _, part in self.data.parts(managed, managed.full_kind) if managed.numel else ():
                yield part
        else:
            yield self.full_precision(managed).contiguous().view(-1)

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """As `nn.Module.state_dict` names it, or these names of it; tied names share one tensor."""
        entries = self.entries()
        if names is not None:
            if unknown := set(names) - entries.keys():
                raise ModelError(f"the model's state has nothing named {', '.join(map(repr, sorted(unknown)))}")
            entries = {name: tensor for name, tensor in entries.items() if name in names}
        values: dict[ManagedParam, torch.Tensor] = {}
        state = {}
        for name, tensor in entries.items():
            managed = managed_param_of(tensor)
            if managed is None:
                plain = isinstance(tensor, torch.Tensor)
                state[name] = tensor.detach().cpu().clone() if plain else copy.deepcopy(tensor)
                continue
            if managed not in values:
                values[managed] = self.full_precision(managed)
            state[name] = values[managed]
        return state

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take it back; nothing changes unless all names and shapes fit."""
        own = self.entries()
        missing, unknown = own.keys() - state_dict.keys(), state_dict.keys() - own.keys()
        if not strict:
            own = {name: value for name, value in own.items() if name not in missing}
            missing = set()
        tensors = {name for name, value in own.items() if isinstance(value, torch.Tensor)} & state_dict.keys()
        shapes = [name for name in tensors if own[name].shape != state_dict[name].shape]
        if missing or unknown or shapes:
            raise ModelError(
                f"the state does not fit the model, nothing was loaded: missing {sorted(missing)}, "
                f"unknown {sorted(unknown)}, of another shape {sorted(shapes)}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                managed = managed_param_of(tensor)
                if not isinstance(tensor, torch.Tensor):
                    self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(copy.deepcopy(state_dict[name]))
                elif managed is None:
                    tensor.copy_(state_dict[name])
                else:
                    self._assign(managed, state_dict[name])
        self.data.drop_gathered()

    def release(self) -> list[str]:
        """Give every chunk back; parameters become ordinary ones on the host, in full precision.

        Returns the names of those that could not be read back, since the disk has failed; they are all NaN.
        """
        manager = self.data.manager
        self.data.closed = True
        try:
            return self._give_back(manager)
        finally:
            manager.close()
            manager.host_tier.close()

    def _give_back(self, manager: ChunkManager) -> list[str]:
        lost = []
        for managed in self.data.managed_params:
            release_parameter(managed)
        for chunk in list(manager.chunks.values()):
            if chunk.kind not in (PARAM16, SHARD16, PARAM32):
                manager.remove(chunk)
        for index, managed_params in self.data.by_chunk.items():
            for managed in managed_params:
                value = self._salvage(managed) if self.keep_values else None
                if value is None:
                    lost.append(managed.name)
                    value = self.data.placeholder(managed.chunk.dtype).expand(managed.shape)
                managed.param.data = value
                managed.device_view = None
            for kind in (PARAM16, SHARD16, PARAM32):
                if (kind, index) in manager.chunks:
                    manager.remove(manager[kind, index])
        if self.synchronized and self.data.comm is not None:
            lost = self._lost_anywhere(lost)
        return lost

    def _lost_anywhere(self, lost: list[str]) -> list[str]:
        """The names of parameters of which any process has lost its part; all are NaN here too."""
        assert self.data.comm is not None
        names = set().union(*self.data.comm.world.all_gather_object(lost))
        for managed in self.data.managed_params:
            if managed.name in names and managed.name not in lost:
                managed.param.data = self.data.placeholder(managed.chunk.dtype).expand(managed.shape)
        return [managed.name for managed in self.data.managed_params if managed.name in names]

    def _salvage(self, managed: ManagedParam) -> torch.Tensor | None:
        """A parameter's value, unless it is lost."""
        if self.data.comm is not None and not self.synchronized:
            return None
        try:
            return self.full_precision(managed)
        except (DiskError, MoveError, TrainingError):
            return None

    def entries(self) -> dict[str, Any]:
        """What `nn.Module.state_dict` names: parameters, persistent buffers, extra state."""
        entries: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return entries

    def _assign(self, managed: ManagedParam, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.write(managed, PARAM16, value)
            torch.autograd.graph.increment_version(managed.param)
            if managed.schema.trained:
                self.write(managed, PARAM32, value)
