"""Parameters, buffers and optimizer states by name, in full precision."""

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar._layout.schema import PARAM16, PARAM32, SHARD16
from patrickstar._memory.chunk_manager import Manager
from patrickstar._params.managed_param import Slot
from patrickstar._params.model_data import ModelData
from patrickstar._params.tensor_subclass import release_parameter, slot_of
from patrickstar.errors import DiskError, ModelError, MoveError, TrainingError


class ModelState:
    """Reads and writes what the chunks of a model hold, wherever it lies."""

    def __init__(self, module: nn.Module, data: ModelData) -> None:
        self.module = module
        self.data = data
        self.keep = True
        """Whether `release` leaves parameters their values."""
        self.complete = False
        """Whether all processes are here for that, if there are several."""
        self.process = os.getpid()
        """The process that has the chunks. See [Note: memory that children do not get]."""

    def read(self, slot: Slot, kind: str) -> torch.Tensor:
        """A copy, on the host, of a parameter in a list; of several processes each gives its part."""
        kind = slot.own.kind if kind == PARAM16 else kind
        chunk = self.data.manager[kind, slot.place.chunk]
        found = torch.empty_strided(slot.shape, slot.region.strides, dtype=chunk.dtype, device="cpu")
        flat = found.as_strided((slot.numel,), (1,))
        own = flat[slot.part]
        try:
            for where, part in self.data.parts(slot, kind) if slot.place.numel else ():
                own[where].copy_(part)
        except (DiskError, MoveError, TrainingError):
            own.fill_(float("nan"))
            self.data.complete_parts(slot, flat)  # the others have come for it
            raise
        self.data.complete_parts(slot, flat)
        return found

    def write(self, slot: Slot, kind: str, value: torch.Tensor) -> None:
        """Set this process's part of a parameter in a list."""
        if not slot.place.numel:
            return
        kind = slot.own.kind if kind == PARAM16 else kind
        flat = slot.flattened(value)[slot.part]
        for where, part in self.data.parts(slot, kind, write=True):
            part.copy_(flat[where])

    def full_precision(self, slot: Slot) -> torch.Tensor:
        """A copy of a parameter on the host: of its master, or of itself if it is frozen."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self.read(slot, slot.full_kind)

    def pieces(self, slot: Slot) -> Iterator[torch.Tensor]:
        """The same, its elements in a row in the order of its shape, without a copy where none is needed.

        What lies on disk comes a page at a time; of several processes' parts one parameter is put together.
        """
        if slot.row_major and self.data.peers is None:
            for _, part in self.data.parts(slot, slot.full_kind) if slot.numel else ():
                yield part
        else:
            yield self.full_precision(slot).contiguous().view(-1)

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """As `nn.Module.state_dict` names it, or these names of it; tied names share one tensor."""
        entries = self.entries()
        if names is not None:
            if unknown := set(names) - entries.keys():
                raise ModelError(f"the model's state has nothing named {', '.join(map(repr, sorted(unknown)))}")
            entries = {name: tensor for name, tensor in entries.items() if name in names}
        values: dict[Slot, torch.Tensor] = {}
        state = {}
        for name, tensor in entries.items():
            slot = slot_of(tensor)
            if slot is None:
                plain = isinstance(tensor, torch.Tensor)
                state[name] = tensor.detach().cpu().clone() if plain else copy.deepcopy(tensor)
                continue
            if slot not in values:
                values[slot] = self.full_precision(slot)
            state[name] = values[slot]
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
                slot = slot_of(tensor)
                if not isinstance(tensor, torch.Tensor):
                    self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(copy.deepcopy(state_dict[name]))
                elif slot is None:
                    tensor.copy_(state_dict[name])
                else:
                    self._assign(slot, state_dict[name])
        self.data.forget_gathered()

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
            manager.host.close()

    def _give_back(self, manager: Manager) -> list[str]:
        lost = []
        for slot in self.data.slots:
            release_parameter(slot)
        for chunk in list(manager.chunks.values()):
            if chunk.kind not in (PARAM16, SHARD16, PARAM32):
                manager.remove(chunk)
        for index, slots in self.data.by_chunk.items():
            for slot in slots:
                value = self._salvage(slot) if self.keep else None
                if value is None:
                    lost.append(slot.name)
                    value = self.data.absent(slot.chunk.dtype).expand(slot.shape)
                slot.param.data = value
                slot.device_view = None
            for kind in (PARAM16, SHARD16, PARAM32):
                if (kind, index) in manager.chunks:
                    manager.remove(manager[kind, index])
        if self.complete and self.data.peers is not None:
            lost = self._lost_anywhere(lost)
        return lost

    def _lost_anywhere(self, lost: list[str]) -> list[str]:
        """The names of parameters of which any process has lost its part; all are NaN here too."""
        assert self.data.peers is not None
        names = set().union(*self.data.peers.world.tell(lost))
        for slot in self.data.slots:
            if slot.name in names and slot.name not in lost:
                slot.param.data = self.data.absent(slot.chunk.dtype).expand(slot.shape)
        return [slot.name for slot in self.data.slots if slot.name in names]

    def _salvage(self, slot: Slot) -> torch.Tensor | None:
        """A parameter's value, unless it is lost."""
        if self.data.peers is not None and not self.complete:
            return None
        try:
            return self.full_precision(slot)
        except (DiskError, MoveError, TrainingError):
            return None

    def entries(self) -> dict[str, Any]:
        """What `nn.Module.state_dict` names: parameters, persistent buffers, extra state."""
        entries: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return entries

    def _assign(self, slot: Slot, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.write(slot, PARAM16, value)
            torch.autograd.graph.increment_version(slot.param)
            if slot.scheme.trained:
                self.write(slot, PARAM32, value)
