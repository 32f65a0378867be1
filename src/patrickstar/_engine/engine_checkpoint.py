"""Checkpoints of an engine's state, from which training resumes with identical bits."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from patrickstar._checkpoint import dcp_calls, json_codec
from patrickstar._checkpoint.async_save import AsyncSave
from patrickstar._checkpoint.direct_writer import PAGES
from patrickstar._checkpoint.linked_chunks import LinkedChunks
from patrickstar._checkpoint.load_planner import ShardLoadPlanner
from patrickstar._checkpoint.metadata import (
    COMMON,
    CommonMetadata,
    RankMetadata,
    optimizer_name,
    random_states,
    rank_key,
    read_common,
    read_rank,
    restore_random_states,
)
from patrickstar._checkpoint.page_references import can_refer, copied_bytes
from patrickstar._checkpoint.save_planner import (
    TensorShard,
    checksum,
    json_item,
    name_of,
    param_shards,
    rank_buffer_key,
    saved_kinds,
    whole_tensors,
)
from patrickstar._checkpoint.state_source import StateSource
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._distributed.process_group import explain_peer_failure
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._hardware.direct_io import BLOCK_BYTES, PAGE_BYTES
from patrickstar._hardware.sigint_gate import interruptible, interruption_point
from patrickstar._hardware.transfer import Deferred
from patrickstar._layout.schema import PARAM16, PARAM32
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar._schedule.coordination import Request
from patrickstar.errors import CheckpointError, PatrickStarError, TrainingError


class EngineCheckpoint:
    """Writer and reader of checkpoints of one engine."""

    def __init__(self, core: EngineCore, optimizer: ChunkOptimizer) -> None:
        self.core, self.optimizer = core, optimizer

    # Saving

    def start_save(
        self,
        target: Path,
        state: Mapping[str, Any],
        done: Callable[[], None] | None = None,
        *,
        frozen: bool = True,
        wait: bool = True,
    ) -> None:
        """Start writing a checkpoint; collective.

        Args:
            done: Called when the checkpoint is complete.
            frozen: Include frozen parameters.
            wait: The caller waits for the checkpoint: it need not wait for updates that end beside the next forward.
        """
        core, shards = self.core, self.core.shards
        self.core.background_save.wait()
        core.optimizer_in_backward.check_inactive("saving")
        later = not wait and self._can_start_later(target)
        if not later:
            core.complete()
        unused = [
            managed.name
            for managed in shards.managed_params
            if managed.in_next_step or managed.state.partial is not None
        ]
        core.data.residency.end()
        core.sharing.synchronize_processes(Request.STATE)
        with core.sharing.collective_section():
            if core.optimizer_step.lock_free is not None and not any(core.world.all_gather_object(bool(unused))):
                core.end_delay()  # checkpoints hold no sums of gradients
            core.sharing.share_optimizer_extra()
            pieces: list[TensorShard] = []
            error: Exception | None = None
            try:
                if unused:
                    raise TrainingError(
                        f"parameter {unused[0]!r} has a gradient that no step has used, and checkpoints do not store "
                        f"gradients; save between optimizer.step() and the next backward"
                    )
                self._check_names()
                pieces = self._shards(state, frozen)
            except Exception as caught:  # a user's state_dict may raise anything; all processes have to learn of it
                error = caught
            error = core.world.agree_on_error(error, CheckpointError)
            if error is None:
                pieces = self._with_rank_buffers(pieces)
                target = Path(core.world.all_gather_object(str(target.absolute()))[0])
                if later:
                    self._start_later(target, [piece.copied() for piece in pieces], done)
                else:
                    self._start(target, pieces, done)
        if error is not None:
            raise error

    def _start(self, target: Path, pieces: Sequence[TensorShard], done: Callable[[], None] | None) -> None:
        """Start the save of these pieces."""
        core, page_bytes = self.core, self._reserve_pages(copied_bytes(pieces, self.core.shards, target))
        group = core.world.checkpoints
        saving = AsyncSave(target, pieces, core.shards, group, page_bytes=page_bytes, done=done)
        core.background_save.saving = saving
        saving.copy_volatile()

    def _can_start_later(self, target: Path) -> bool:
        """Return whether a save need not begin before updates have ended. See [Note: saving beside training]."""
        core = self.core
        exact = core.config.late_update is None and core.optimizer_step.together is None
        return exact and core.world.size == 1 and can_refer(core.manager.disk_tier, target)

    def _start_later(self, target: Path, pieces: Sequence[TensorShard], done: Callable[[], None] | None) -> None:
        """Start the save when the next backward does, or something else that could change what it saves."""
        core, save = self.core, self.core.background_save

        def start() -> None:
            core.complete()
            with core.internal_computation():
                self._start(target, pieces, done)

        def start_before(index: int) -> None:
            save.begin()
            core.shards.before_update(index)

        save.start = start
        core.shards.reads = {
            index: Deferred(f"the start of a checkpoint with chunks {index}", partial(start_before, index))
            for index in core.shards.by_chunk
        }

    def _check_names(self) -> None:
        """Raise CheckpointError if a parameter is no longer where it was in the model when the engine was created.

        Checkpoints have the names of that time; those of a compiled module are without the compiler's prefix.
        """
        params = self.core.module.named_parameters(remove_duplicate=False)
        names = [(name.replace("_orig_mod.", ""), param) for name, param in params]
        by_name = dict(names)
        for managed in self.core.model_params:
            if by_name.get(managed.name) is not managed.param:
                now = next((f"{name!r} now" for name, param in names if param is managed.param), "not in the model now")
                raise CheckpointError(
                    f"parameter {managed.name!r} is {now}, and checkpoints have the names that parameters had in "
                    f"ps.initialize: undo the change of the model, or use engine.state_dict(), which has today's names"
                )

    def _reserve_pages(self, nbytes: int) -> int:
        """Reserve host memory for the pages in flight and return the page size in bytes.

        The pages together take two chunks at most, or less if the host has less memory or no process writes as many
        bytes. If even the smallest pages, 36 KiB together, exceed the host budget, they are not counted in it.
        """
        core, manager = self.core, self.core.manager
        largest = max(chunk.compute_bytes // max(1, len(chunk.shard_bounds) - 1) for chunk in core.layout.chunks)
        nbytes = min(2 * largest, max(core.world.all_gather_object(nbytes)))
        page_bytes = min(PAGE_BYTES, max(1, nbytes // PAGES // BLOCK_BYTES) * BLOCK_BYTES)
        while not manager.free_host(page_bytes * PAGES) and page_bytes > BLOCK_BYTES:
            page_bytes = max(1, page_bytes // 2 // BLOCK_BYTES) * BLOCK_BYTES
        core.shards.update_param_views()
        agreed: int = min(core.world.all_gather_object(page_bytes))
        self.core.background_save.reserved_bytes = agreed * PAGES if manager.host_tier.has_room(agreed * PAGES) else 0
        manager.host_tier.reserve(self.core.background_save.reserved_bytes, "a checkpoint being written")
        return agreed

    def _shards(self, state: Mapping[str, Any], frozen: bool) -> list[TensorShard]:
        """Return everything that this process writes, beginning with state that may change at any time."""
        core, rank = self.core, self.core.world.rank
        own = RankMetadata(
            random=random_states(core.device), user={name: _state_of(value) for name, value in state.items()}
        )
        shards = [json_item(rank_key(rank), json_codec.dumps(dict(own), "the state"))]
        if rank == 0:
            shards.append(
                json_item(COMMON, json_codec.dumps(dict(self._common_metadata(frozen)), "the optimizer's state"))
            )
            shards += whole_tensors({f"model.{name}": value for name, value in self._buffers().items()})
        saved = {managed for managed in core.model_params if frozen or managed.schema.trained}
        shards += [piece for piece in param_shards(core.shards, core.optimizer_step.order) if piece.managed in saved]
        return shards

    def _common_metadata(self, frozen: bool) -> CommonMetadata:
        core = self.core
        return CommonMetadata(
            patrickstar=version("patrickstar"),
            precision=core.config.precision,
            frozen=frozen,
            optimizer=optimizer_name(core.config.optimizer),
            states=list(core.config.optimizer.states),
            groups=self.optimizer._packed_groups(lambda managed: managed.name),
            steps={managed.name: managed.steps for managed in core.model_params if managed.steps},
            optimizer_steps=core.optimizer_step.steps,
            memory={managed.name: managed.optimizer_extra for managed in core.model_params if managed.optimizer_extra},
            buffers=sorted(self._buffers()),
            loss_scale={name: float(value) for name, value in core.scaler.state_dict().items()},
            batch_of=list(core.distribution.mesh.batch_of),
            own={} if (together := core.optimizer_step.together) is None else together.optimizer.saved(),
            extra={
                name: value for name, value in core.model_state.entries().items() if not isinstance(value, torch.Tensor)
            },
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        entries = self.core.model_state.entries().items()
        return {
            name: value
            for name, value in entries
            if isinstance(value, torch.Tensor) and managed_param_of(value) is None
        }

    def _with_rank_buffers(self, pieces: list[TensorShard]) -> list[TensorShard]:
        """Add the buffers of this process that differ from those of rank 0."""
        world = self.core.world
        if world.size == 1:
            return pieces
        buffers = self._buffers()
        sums = {name: checksum(value) for name, value in buffers.items()}
        first = world.all_gather_object(sums)[0]
        differ = {rank_buffer_key(name, world.rank): buffers[name] for name in buffers if sums[name] != first[name]}
        return whole_tensors(differ) + pieces

    # Loading

    def load(self, folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Load everything and return the user's state."""
        core, shards = self.core, self.core.shards
        self.core.background_save.wait()
        core.optimizer_in_backward.check_inactive("loading a checkpoint")
        core.complete()
        core.sharing.synchronize_processes(Request.STATE)
        reader: CheckpointReader | None = None
        error: Exception | None = None
        with core.sharing.collective_section():
            try:
                reader = CheckpointReader(folder)
                common = read_common(reader)
                source = self._source(reader, common)
                own = self._rank_metadata(reader, source)
                self._check_compatible(reader, common)
                self._validate(common, own)
                missing = [name for name in state if name not in own.user]
                if missing:
                    raise CheckpointError(f"{folder} has no state {missing[0]!r}; it has {sorted(own.user)}")
            except PatrickStarError as caught:
                error = caught
            error = core.world.agree_on_error(error, CheckpointError)
            if error is None:
                assert reader is not None
                core.optimizer_step.flush()
                core.gradients.drop()
                group: dist.ProcessGroup | None = core.world.checkpoints
                try:
                    with explain_peer_failure(self.core.world):
                        linked = LinkedChunks(reader, shards)
                        planner = ShardLoadPlanner(shards, self._targets(reader, source), linked.chunks)
                        dcp_calls.load(reader, planner, group)
                        linked.apply()
                    self._restore(reader, common, planner.holds_delayed)
                except CheckpointError as caught:
                    error = caught  # raised in every process
        if error is not None:
            raise error
        if common.precision != core.config.precision and "precision" not in core.config.model_fields_set:
            warnings.warn(
                f"{folder} was trained in {common.precision}, and precision='auto' is {core.config.precision} here: "
                f"training goes on in {core.config.precision}. For the bits of an uninterrupted run, give "
                f"precision={common.precision!r}",
                stacklevel=3,
            )
        restore_random_states(own.random, core.device)
        for name, value in state.items():
            if hasattr(value, "load_state_dict"):
                with interruptible():
                    value.load_state_dict(own.user[name])
        return own.user

    def _source(self, reader: CheckpointReader, common: CommonMetadata) -> StateSource:
        """Return the ranks of the checkpoint whose state this process restores."""
        saved = common.batch_of or range(reader.manifest.processes)
        return StateSource.of(saved, self.core.distribution.mesh.batch_of, self.core.world.rank)

    def _rank_metadata(self, reader: CheckpointReader, source: StateSource) -> RankMetadata:
        """Return the user's state and the random generators that this process restores."""
        own = read_rank(reader, source.state)
        if source.generators is None:
            return RankMetadata(random=random_states(self.core.device), user=own.user)
        if source.generators != source.state:
            own = RankMetadata(random=read_rank(reader, source.generators).random, user=own.user)
        return own

    def _check_compatible(self, reader: CheckpointReader, common: CommonMetadata) -> None:
        """Raise CheckpointError, naming all differences, if the checkpoint is of another model or optimizer."""
        core = self.core
        self._check_names()
        stored = {name: tensor for name, tensor in reader.manifest.tensors.items() if name.startswith("model.")}
        shapes = {f"model.{managed.name}": list(managed.full_shape) for managed in core.model_params}
        shapes |= {f"model.{name}": list(value.shape) for name, value in self._buffers().items()}
        missing, surplus = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
        if not common.frozen:
            missing -= {f"model.{managed.name}" for managed in core.model_params if not managed.schema.trained}
        reshaped = [name for name in shapes.keys() & stored.keys() if stored[name].shape != shapes[name]]
        if missing or surplus or reshaped:
            differences = {"it lacks": missing, "the model lacks": surplus, "of another shape are": reshaped}
            texts = [
                f"{label} {', '.join(sorted(name.removeprefix('model.') for name in names))}"
                for label, names in differences.items()
                if names
            ]
            raise CheckpointError(f"{reader.folder} does not fit the model, nothing was loaded: {'; '.join(texts)}")
        own, kinds = optimizer_name(core.config.optimizer), list(core.config.optimizer.states)
        if common.optimizer != own or common.states != kinds:
            raise CheckpointError(
                f"{reader.folder} was written with {common.optimizer}, whose states are {common.states}, but the "
                f"engine has {own} with {kinds}; nothing was loaded, use the same optimizer"
            )
        names = [group["params"] for group in self.optimizer._packed_groups(lambda managed: managed.name)]
        if [group["params"] for group in common.groups] != names:
            sizes = [len(group["params"]) for group in common.groups]
            raise CheckpointError(
                f"{reader.folder} has param groups of {sizes} parameters, the optimizer has groups of "
                f"{[len(group) for group in names]}, or other parameters; nothing was loaded, use the same groups"
            )

    def _validate(self, common: CommonMetadata, own: RankMetadata) -> None:
        """Raise CheckpointError for metadata that cannot be used, as far as possible before anything changes."""
        core, current = self.core, random_states(self.core.device)
        try:
            for group in common.groups:
                core.config.optimizer.rule(group, 1, {})
            for name in common.extra:
                core.module.get_submodule(name.rpartition(".")[0])
            restore_random_states(own.random, core.device)
        except Exception as error:  # libraries raise various errors for values of a wrong type
            raise CheckpointError(
                f"the checkpoint has invalid metadata, nothing was loaded ({type(error).__name__}: {error})"
            ) from error
        finally:
            restore_random_states(current, core.device)

    def _targets(self, reader: CheckpointReader, source: StateSource) -> dict[str, torch.Tensor]:
        """Return the buffers by their names in the checkpoint."""
        targets = {}
        for name, value in self._buffers().items():
            own = rank_buffer_key(name, source.state)
            targets[own if own in reader.manifest.tensors else f"model.{name}"] = value
        return targets

    def _restore(
        self, reader: CheckpointReader, common: CommonMetadata, holds_delayed: Callable[[ManagedParam], bool]
    ) -> None:
        """Restore what depends on the loaded chunk lists, and plain data."""
        core, shards = self.core, self.core.shards
        core.optimizer_step.resume(common.optimizer_steps)
        delayed = core.optimizer_step.delayed if core.optimizer_step.is_late else None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for managed in core.model_params:
                interruption_point()
                for kind in saved_kinds(managed):
                    if kind not in (PARAM16, PARAM32) and name_of(managed, kind) not in reader.manifest.tensors:
                        core.model_state.write(managed, kind, torch.zeros((), device="cpu"))  # frozen when saved
                managed.steps, managed.observed = int(common.steps.get(managed.name, 0)), False
                managed.optimizer_extra.clear()
                managed.optimizer_extra.update(common.memory.get(managed.name, {}))
                if delayed is not None and holds_delayed(managed):
                    delayed.hold_back(managed)
                else:
                    shards.follow_master(managed)
        core.optimizer_in_backward.begin_again()
        core.sharing.drop_gathered()
        core.scaler.load_state_dict(common.loss_scale)
        self.optimizer._update_groups(common.groups)
        if (together := core.optimizer_step.together) is not None:
            together.optimizer.restore(common.own)
        for name, value in common.extra.items():
            core.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _state_of(value: Any) -> Any:
    with interruptible():
        return value.state_dict() if hasattr(value, "state_dict") else value
