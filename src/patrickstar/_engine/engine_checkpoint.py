"""An engine's state as a checkpoint, and back: all that a run needs to go on with the same bits."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_64_hexdigest

from patrickstar._checkpoint import dcp_calls, json_codec
from patrickstar._checkpoint.async_save import AsyncSave
from patrickstar._checkpoint.background_save import explaining
from patrickstar._checkpoint.direct_writer import PAGES
from patrickstar._checkpoint.load_planner import ShardLoadPlanner
from patrickstar._checkpoint.metadata import COMMON, CommonMetadata, RankMetadata, rank_key, read_common, read_rank
from patrickstar._checkpoint.rng_state import random_states, restore_random_states
from patrickstar._checkpoint.save_planner import (
    TensorShard,
    json_item,
    kinds_of,
    name_of,
    pieces_of,
    pieces_of_tensors,
)
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._memory.swap_file import BLOCK_BYTES, PAGE_BYTES
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar._schedule.coordination import Request
from patrickstar.errors import CheckpointError, PatrickStarError, TrainingError
from patrickstar.optim import Optimizer, TorchOptimizer

EMPTY_STATE: Mapping[str, Any] = MappingProxyType({})


class EngineCheckpoint:
    """Writes and reads the checkpoints of one core."""

    def __init__(self, core: EngineCore, optimizer: ChunkOptimizer) -> None:
        self.core, self.optimizer = core, optimizer

    # Saving

    def start_save(
        self, target: Path, state: Mapping[str, Any], done: Callable[[], None] | None = None, *, frozen: bool = True
    ) -> None:
        """Begin to write a checkpoint; with several processes all have to come.

        `done` is called when it is there. frozen: with parameters that are.
        """
        core, data = self.core, self.core.data
        self.core.background_save.wait()
        core.optimizer_in_backward.check_inactive("saving")
        core.complete()
        waiting = [
            managed.name
            for managed in data.managed_params
            if data.has_gradient(managed) or managed.partial_grad is not None
        ]
        data.synchronize_processes(Request.STATE)
        with data.collective_section():
            data.share_optimizer_memory()
            pieces: list[TensorShard] = []
            error: Exception | None = None
            try:
                if waiting:
                    raise TrainingError(
                        f"{waiting[0]!r} and others have gradients that were not used yet, and no checkpoint holds "
                        f"gradients; save between optimizer.step() and the next backward"
                    )
                pieces = self._pieces(state, frozen)
            except Exception as found:  # what a state_dict of the user's raises is one for all processes too
                error = found
            error = self._agreed(error)
            if error is None:
                pieces = self._with_other_buffers(pieces)
                page_bytes = self._page_bytes()
                target = Path(self.broadcast(str(target.absolute())))
                group = None if core.world is None else core.world.checkpoints
                data.saving = saving = AsyncSave(target, pieces, data, group, page_bytes=page_bytes, done=done)
                saving.copy_volatile()
        if error is not None:
            raise error

    def _page_bytes(self) -> int:
        """What is written at once, and the memory for it: all that is on its way together is two chunks at most.

        It is less where the host has not as much. Where it has not even room for the smallest pages, 36 KiB, these are
        beyond its budget.
        """
        core, manager = self.core, self.core.manager
        largest = max(chunk.compute_bytes // max(1, len(chunk.shard_bounds) - 1) for chunk in core.layout.chunks)
        page_bytes = min(PAGE_BYTES, max(1, 2 * largest // PAGES // BLOCK_BYTES) * BLOCK_BYTES)
        while not manager.free_host(page_bytes * PAGES) and page_bytes > BLOCK_BYTES:
            page_bytes = max(1, page_bytes // 2 // BLOCK_BYTES) * BLOCK_BYTES
        core.data.update_param_views()
        agreed: int = min(self._all_gather(page_bytes))
        self.core.background_save.reserved_bytes = agreed * PAGES if manager.host_tier.has_room(agreed * PAGES) else 0
        manager.host_tier.reserve(self.core.background_save.reserved_bytes, "a checkpoint on its way")
        return agreed

    def _pieces(self, state: Mapping[str, Any], frozen: bool) -> list[TensorShard]:
        """All that this process writes: first what may change at any time."""
        core, (rank, _) = self.core, self._place
        own = RankMetadata(
            random=random_states(core.device), user={name: _state_of(value) for name, value in state.items()}
        )
        found = [json_item(rank_key(rank), json_codec.dumps(dict(own), "the state"))]
        if rank == 0:
            found.append(json_item(COMMON, json_codec.dumps(dict(self._common(frozen)), "the optimizer's state")))
            found += pieces_of_tensors({f"model.{name}": value for name, value in self._buffers().items()})
        for piece in pieces_of(core.data, core.optimizer_step.order):
            if frozen or (piece.managed is not None and piece.managed.schema.trained):
                found.append(piece)
        return found

    def _common(self, frozen: bool) -> CommonMetadata:
        core, optimizer = self.core, self.optimizer
        groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(options | {"params": [optimizer._managed_param(param).name for param in group["params"]]})
        return CommonMetadata(
            patrickstar=version("patrickstar"),
            precision=core.config.precision,
            frozen=frozen,
            optimizer=_kind_of(core.config.optimizer),
            states=list(core.config.optimizer.states),
            groups=groups,
            steps={managed.name: managed.steps for managed in core.data.managed_params if managed.steps},
            memory={
                managed.name: managed.optimizer_extra for managed in core.data.managed_params if managed.optimizer_extra
            },
            buffers=sorted(self._buffers()),
            loss_scale={name: float(value) for name, value in core.scaler.state_dict().items()},
            extra={name: one for name, one in core.model_state.entries().items() if not isinstance(one, torch.Tensor)},
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        entries = self.core.model_state.entries().items()
        return {
            name: value
            for name, value in entries
            if isinstance(value, torch.Tensor) and managed_param_of(value) is None
        }

    def _with_other_buffers(self, pieces: list[TensorShard]) -> list[TensorShard]:
        """Buffers of other processes are written by these, where they differ from the first one's."""
        world = self.core.world
        if world is None:
            return pieces
        buffers = self._buffers()
        sums = {name: _checksum(value) for name, value in buffers.items()}
        first = world.all_gather_object(sums)[0]
        differ = {_rank_buffer_key(name, world.rank): buffers[name] for name in buffers if sums[name] != first[name]}
        return pieces_of_tensors(differ) + pieces

    # Loading

    def load(self, folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take everything back; what the user gave is returned."""
        core, data = self.core, self.core.data
        self.core.background_save.wait()
        core.optimizer_in_backward.check_inactive("loading a checkpoint")
        core.complete()
        data.synchronize_processes(Request.STATE)
        reader: CheckpointReader | None = None
        error: Exception | None = None
        with data.collective_section():
            try:
                reader = CheckpointReader(folder)
                common, own = read_common(reader), self._own(reader)
                self._check(reader, common)
                self._try(common, own)
                lacking = [name for name in state if name not in own.user]
                if lacking:
                    raise CheckpointError(f"{folder} has no state {lacking[0]!r}, but {sorted(own.user)}")
            except PatrickStarError as found:
                error = found
            error = self._agreed(error)
            if error is None:
                assert reader is not None
                core.gradients.drop()
                group: dist.ProcessGroup | None = None if core.world is None else core.world.checkpoints
                try:
                    with explaining(self.core.world):
                        dcp_calls.load(reader, ShardLoadPlanner(data, self._targets(reader)), group)
                    self._restore(reader, common)
                except CheckpointError as found:
                    error = found  # which all know
        if error is not None:
            raise error
        restore_random_states(own.random, core.device)
        for name, value in state.items():
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(own.user[name])
        return own.user

    def _own(self, reader: CheckpointReader) -> RankMetadata:
        """What is told of this process, or of the first one if there were others."""
        rank, size = self._place
        before = reader.document.processes
        own = read_rank(reader, rank if before == size else 0)
        if before != size and rank:
            # Its generators are where those of a process of this rank were, if there was one; else they go on.
            random = read_rank(reader, rank).random if rank < before else random_states(self.core.device)
            own = RankMetadata(random=random, user=own.user)
        return own

    def _check(self, reader: CheckpointReader, common: CommonMetadata) -> None:
        """Raise CheckpointError if it is of another model or optimizer, all differences by name."""
        core = self.core
        stored = {name: tensor for name, tensor in reader.document.tensors.items() if name.startswith("model.")}
        shapes = {f"model.{managed.name}": list(managed.shape) for managed in core.data.managed_params}
        shapes |= {f"model.{name}": list(value.shape) for name, value in self._buffers().items()}
        missing, surplus = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
        if not common.frozen:
            missing -= {f"model.{managed.name}" for managed in core.data.managed_params if not managed.schema.trained}
        other = [name for name in shapes.keys() & stored.keys() if stored[name].shape != shapes[name]]
        if missing or surplus or other:
            differences = {"it lacks": missing, "the model lacks": surplus, "of another shape are": other}
            told = [
                f"{what} {', '.join(sorted(name.removeprefix('model.') for name in names))}"
                for what, names in differences.items()
                if names
            ]
            raise CheckpointError(f"{reader.folder} does not fit the model, nothing was loaded: {'; '.join(told)}")
        own, kinds = _kind_of(core.config.optimizer), list(core.config.optimizer.states)
        if common.optimizer != own or common.states != kinds:
            raise CheckpointError(
                f"{reader.folder} was written with {common.optimizer}, whose states are {common.states}, and the "
                f"engine has {own} with {kinds}; nothing was loaded, use the same optimizer"
            )
        groups = self.optimizer.param_groups
        names = [[self.optimizer._managed_param(param).name for param in group["params"]] for group in groups]
        if [group["params"] for group in common.groups] != names:
            sizes = [len(group["params"]) for group in common.groups]
            raise CheckpointError(
                f"{reader.folder} has param groups of {sizes} parameters, and the optimizer of "
                f"{[len(group) for group in names]}, or others in them; nothing was loaded, make the same groups"
            )

    def _try(self, common: CommonMetadata, own: RankMetadata) -> None:
        """Raise CheckpointError if what is told can't be used, as far as that shows before anything changes."""
        core, now = self.core, random_states(self.core.device)
        try:
            for group in common.groups:
                core.config.optimizer.rule(group, 1, {})
            for name in common.extra:
                core.module.get_submodule(name.rpartition(".")[0])
            restore_random_states(own.random, core.device)
        except Exception as error:  # whatever libraries raise for values of a wrong kind
            raise CheckpointError(
                f"the checkpoint tells what can't be used, nothing was loaded ({type(error).__name__}: {error})"
            ) from error
        finally:
            restore_random_states(now, core.device)

    def _targets(self, reader: CheckpointReader) -> dict[str, torch.Tensor]:
        """Buffers, under the names that they have in the checkpoint.

        They are this process's own, or the first one's if they were the same, or there was another number of processes.
        """
        rank, size = self._place
        rank = rank if reader.document.processes == size else 0
        found = {}
        for name, value in self._buffers().items():
            own = _rank_buffer_key(name, rank)
            found[own if own in reader.document.tensors else f"model.{name}"] = value
        return found

    def _restore(self, reader: CheckpointReader, common: CommonMetadata) -> None:
        """What follows from the lists that were read, and what is plain data."""
        core, data = self.core, self.core.data
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for managed in data.managed_params:
                for kind in kinds_of(managed):
                    if kind not in (PARAM16, PARAM32) and name_of(managed, kind) not in reader.document.tensors:
                        core.model_state.write(managed, kind, torch.zeros((), device="cpu"))  # it was frozen then
                managed.steps, managed.observed = int(common.steps.get(managed.name, 0)), False
                managed.optimizer_extra.clear()
                managed.optimizer_extra.update(common.memory.get(managed.name, {}))
                data.follow_master(managed)
        data.drop_gathered()
        core.scaler.load_state_dict(common.loss_scale)
        for group, saved in zip(self.optimizer.param_groups, common.groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for name, value in common.extra.items():
            core.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    # All processes together

    @property
    def _place(self) -> tuple[int, int]:
        """Which of how many processes this is."""
        world = self.core.world
        return (0, 1) if world is None else (world.rank, world.size)

    def _agreed(self, error: Exception | None) -> Exception | None:
        """What went wrong in any process."""
        return error if self.core.world is None else self.core.world.agree_on_error(error, CheckpointError)

    def broadcast(self, value: Any) -> Any:
        """What the first process says."""
        return self._all_gather(value)[0]

    def _all_gather(self, value: Any) -> list[Any]:
        """What all say."""
        return [value] if self.core.world is None else self.core.world.all_gather_object(value)


def _kind_of(optimizer: Optimizer) -> str:
    """The optimizer's class, PyTorch's own if it is one of those."""
    if isinstance(optimizer, TorchOptimizer):
        return f"{optimizer.kind.__module__}.{optimizer.kind.__qualname__}"
    return type(optimizer).__name__


def _rank_buffer_key(name: str, rank: int) -> str:
    """A buffer that one process alone has so."""
    return f"ranks.{rank}.model.{name}"


def _checksum(value: torch.Tensor) -> str:
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxh3_64_hexdigest(flat.numpy().tobytes())


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
