"""An engine's state as a checkpoint, and back: all that a run needs to go on with the same bits."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from xxhash import xxh3_64_hexdigest

from patrickstar.checkpoint import orchestra, plain
from patrickstar.checkpoint.page_file import PAGES
from patrickstar.checkpoint.reader import CheckpointReader
from patrickstar.engine.loading import LoadingPlanner
from patrickstar.engine.optimizers import Optimizer, TorchOptimizer
from patrickstar.engine.parameters import slot_of
from patrickstar.engine.randomness import random_states, restore_random_states
from patrickstar.engine.saving import Saving
from patrickstar.engine.snapshot import (
    Piece,
    kinds_of,
    name_of,
    pieces_of,
    pieces_of_tensors,
    plain_piece,
)
from patrickstar.engine.told import COMMON, Common, Own, of_rank, read_common, read_own
from patrickstar.errors import CheckpointError, PatrickStarError, TrainingError
from patrickstar.layout.lists import PARAM16, PARAM32
from patrickstar.memory.scratch import BLOCK_BYTES, PAGE_BYTES
from patrickstar.schedule.rounds import Want

if TYPE_CHECKING:
    from patrickstar.engine.engine import Engine

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Persistence:
    """Writes and reads the checkpoints of one engine."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._reserved_bytes = 0
        """Host memory that it takes."""

    # Saving

    def begin(
        self, target: Path, state: Mapping[str, Any], done: Callable[[], None] | None = None, *, frozen: bool = True
    ) -> None:
        """Begin to write a checkpoint; with several processes all have to come.

        `done` is called when it is there. frozen: with parameters that are.
        """
        engine, data = self.engine, self.engine._data
        self.end()
        engine._early.check("saving")
        engine._complete()
        waiting = [slot.name for slot in data.slots if data.has_gradient(slot) or slot.unfinished is not None]
        data.meet(Want.STATE)
        with data.together():
            data.share_memory()
            pieces: list[Piece] = []
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
                target = Path(self.tell(str(target.absolute())))
                group = None if engine.world is None else engine.world.checkpoints
                data.saving = saving = Saving(target, pieces, data, group, page_bytes=page_bytes, done=done)
                saving.copy_what_is_at_hand()
        if error is not None:
            raise error

    def _page_bytes(self) -> int:
        """What is written at once, and the memory for it: all that is on its way together is two chunks at most.

        It is less where the host has not as much. Where it has not even room for the smallest pages, 36 KiB, these are
        beyond its budget.
        """
        engine, manager = self.engine, self.engine._manager
        largest = max(chunk.compute_bytes // max(1, len(chunk.cuts) - 1) for chunk in engine.layout.chunks)
        page_bytes = min(PAGE_BYTES, max(1, 2 * largest // PAGES // BLOCK_BYTES) * BLOCK_BYTES)
        while not manager.clear_host(page_bytes * PAGES) and page_bytes > BLOCK_BYTES:
            page_bytes = max(1, page_bytes // 2 // BLOCK_BYTES) * BLOCK_BYTES
        engine._data.follow_moves()
        agreed: int = min(self._tell_all(page_bytes))
        self._reserved_bytes = agreed * PAGES if manager.host.has_room(agreed * PAGES) else 0
        manager.host.reserve(self._reserved_bytes, "a checkpoint on its way")
        return agreed

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises CheckpointError if it failed."""
        saving = self.engine._data.saving
        if saving is not None:
            try:
                with self._explaining():
                    saving.finish()
            except KeyboardInterrupt:
                saving.give_up("it was interrupted")
                raise
            finally:
                self.engine._data.saving = None
                self.engine._manager.host.unreserve(self._reserved_bytes)

    def look(self) -> None:
        """Take note of a checkpoint that has ended meanwhile: a failure is a warning, and training goes on."""
        saving = self.engine._data.saving
        if saving is not None and saving.ended:
            self.end()

    def end(self) -> bool:
        """Wait for the checkpoint that is being written; a failure is a warning. Returns whether there was none."""
        try:
            self.finish()
        except CheckpointError as error:
            warnings.warn(f"no checkpoint was written, training goes on: {error}", stacklevel=3)
            return False
        return True

    def copy_all(self) -> None:
        """What is wanted of chunks is copied: they will change."""
        if (saving := self.engine._data.saving) is not None:
            saving.copy_all()

    def _pieces(self, state: Mapping[str, Any], frozen: bool) -> list[Piece]:
        """All that this process writes: first what may change at any time."""
        engine, (rank, _) = self.engine, self._place
        own = Own(random=random_states(engine.device), user={name: _state_of(value) for name, value in state.items()})
        found = [plain_piece(of_rank(rank), plain.dumps(dict(own), "the state"))]
        if rank == 0:
            found.append(plain_piece(COMMON, plain.dumps(dict(self._common(frozen)), "the optimizer's state")))
            found += pieces_of_tensors({f"model.{name}": value for name, value in self._buffers().items()})
        for piece in pieces_of(engine._data, engine._update.order):
            if frozen or (piece.slot is not None and piece.slot.scheme.trained):
                found.append(piece)
        return found

    def _common(self, frozen: bool) -> Common:
        engine, optimizer = self.engine, self.engine.optimizer
        groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(options | {"params": [optimizer._slot(param).name for param in group["params"]]})
        return Common(
            patrickstar=version("patrickstar"),
            precision=engine.config.precision,
            frozen=frozen,
            optimizer=_kind_of(engine.config.optimizer),
            states=list(engine.config.optimizer.states),
            groups=groups,
            steps={slot.name: slot.steps for slot in engine._data.slots if slot.steps},
            memory={slot.name: slot.memory for slot in engine._data.slots if slot.memory},
            buffers=sorted(self._buffers()),
            loss_scale={name: float(value) for name, value in engine._scaler.state_dict().items()},
            extra={name: one for name, one in engine._state.entries().items() if not isinstance(one, torch.Tensor)},
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        entries = self.engine._state.entries().items()
        return {name: value for name, value in entries if isinstance(value, torch.Tensor) and slot_of(value) is None}

    def _with_other_buffers(self, pieces: list[Piece]) -> list[Piece]:
        """Buffers of other processes are written by these, where they differ from the first one's."""
        world = self.engine.world
        if world is None:
            return pieces
        buffers = self._buffers()
        sums = {name: _sum_of(value) for name, value in buffers.items()}
        first = world.tell(sums)[0]
        differ = {_of_rank(name, world.rank): buffers[name] for name in buffers if sums[name] != first[name]}
        return pieces_of_tensors(differ) + pieces

    # Loading

    def load(self, folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take everything back; what the user gave is returned."""
        engine, data = self.engine, self.engine._data
        self.end()
        engine._early.check("loading a checkpoint")
        engine._complete()
        data.meet(Want.STATE)
        reader: CheckpointReader | None = None
        error: Exception | None = None
        with data.together():
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
                engine._gradients.drop()
                group: dist.ProcessGroup | None = None if engine.world is None else engine.world.checkpoints
                try:
                    with self._explaining():
                        orchestra.load(reader, LoadingPlanner(data, self._targets(reader)), group)
                    self._restore(reader, common)
                except CheckpointError as found:
                    error = found  # which all know
        if error is not None:
            raise error
        restore_random_states(own.random, engine.device)
        for name, value in state.items():
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(own.user[name])
        return own.user

    def _own(self, reader: CheckpointReader) -> Own:
        """What is told of this process, or of the first one if there were others."""
        rank, size = self._place
        before = reader.document.processes
        own = read_own(reader, rank if before == size else 0)
        if before != size and rank:
            # Its generators are where those of a process of this rank were, if there was one; else they go on.
            random = read_own(reader, rank).random if rank < before else random_states(self.engine.device)
            own = Own(random=random, user=own.user)
        return own

    def _check(self, reader: CheckpointReader, common: Common) -> None:
        """Raise CheckpointError if it is of another model or optimizer, all differences by name."""
        engine = self.engine
        stored = {name: tensor for name, tensor in reader.document.tensors.items() if name.startswith("model.")}
        shapes = {f"model.{slot.name}": list(slot.shape) for slot in engine._data.slots}
        shapes |= {f"model.{name}": list(value.shape) for name, value in self._buffers().items()}
        missing, surplus = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
        if not common.frozen:
            missing -= {f"model.{slot.name}" for slot in engine._data.slots if not slot.scheme.trained}
        other = [name for name in shapes.keys() & stored.keys() if stored[name].shape != shapes[name]]
        if missing or surplus or other:
            differences = {"it lacks": missing, "the model lacks": surplus, "of another shape are": other}
            told = [
                f"{what} {', '.join(sorted(name.removeprefix('model.') for name in names))}"
                for what, names in differences.items()
                if names
            ]
            raise CheckpointError(f"{reader.folder} does not fit the model, nothing was loaded: {'; '.join(told)}")
        own, kinds = _kind_of(engine.config.optimizer), list(engine.config.optimizer.states)
        if common.optimizer != own or common.states != kinds:
            raise CheckpointError(
                f"{reader.folder} was written with {common.optimizer}, whose states are {common.states}, and the "
                f"engine has {own} with {kinds}; nothing was loaded, use the same optimizer"
            )
        groups = engine.optimizer.param_groups
        names = [[engine.optimizer._slot(param).name for param in group["params"]] for group in groups]
        if [group["params"] for group in common.groups] != names:
            sizes = [len(group["params"]) for group in common.groups]
            raise CheckpointError(
                f"{reader.folder} has param groups of {sizes} parameters, and the optimizer of "
                f"{[len(group) for group in names]}, or others in them; nothing was loaded, make the same groups"
            )

    def _try(self, common: Common, own: Own) -> None:
        """Raise CheckpointError if what is told can't be used, as far as that shows before anything changes."""
        engine, now = self.engine, random_states(self.engine.device)
        try:
            for group in common.groups:
                engine.config.optimizer.rule(group, 1, {})
            for name in common.extra:
                engine.module.get_submodule(name.rpartition(".")[0])
            restore_random_states(own.random, engine.device)
        except Exception as error:  # whatever libraries raise for values of a wrong kind
            raise CheckpointError(
                f"the checkpoint tells what can't be used, nothing was loaded ({type(error).__name__}: {error})"
            ) from error
        finally:
            restore_random_states(now, engine.device)

    def _targets(self, reader: CheckpointReader) -> dict[str, torch.Tensor]:
        """Buffers, under the names that they have in the checkpoint.

        They are this process's own, or the first one's if they were the same, or there was another number of processes.
        """
        rank, size = self._place
        rank = rank if reader.document.processes == size else 0
        found = {}
        for name, value in self._buffers().items():
            own = _of_rank(name, rank)
            found[own if own in reader.document.tensors else f"model.{name}"] = value
        return found

    def _restore(self, reader: CheckpointReader, common: Common) -> None:
        """What follows from the lists that were read, and what is plain data."""
        engine, data = self.engine, self.engine._data
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for slot in data.slots:
                for kind in kinds_of(slot):
                    if kind not in (PARAM16, PARAM32) and name_of(slot, kind) not in reader.document.tensors:
                        engine._state.write(slot, kind, torch.zeros((), device="cpu"))  # it was frozen then
                slot.steps, slot.watched = int(common.steps.get(slot.name, 0)), False
                slot.memory.clear()
                slot.memory.update(common.memory.get(slot.name, {}))
                data.follow_master(slot)
        data.forget_gathered()
        engine._scaler.load_state_dict(common.loss_scale)
        for group, saved in zip(engine.optimizer.param_groups, common.groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for name, value in common.extra.items():
            engine.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    # All processes together

    @property
    def _place(self) -> tuple[int, int]:
        """Which of how many processes this is."""
        world = self.engine.world
        return (0, 1) if world is None else (world.rank, world.size)

    def _agreed(self, error: Exception | None) -> Exception | None:
        """What went wrong in any process."""
        return error if self.engine.world is None else self.engine.world.agreed(error, CheckpointError)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """What PyTorch raises when another process is gone names it."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if self.engine.world is None:
                raise
            raise self.engine.world.explain(error) from error

    def tell(self, value: Any) -> Any:
        """What the first process says."""
        return self._tell_all(value)[0]

    def _tell_all(self, value: Any) -> list[Any]:
        """What all say."""
        return [value] if self.engine.world is None else self.engine.world.tell(value)


def _kind_of(optimizer: Optimizer) -> str:
    """The optimizer's class, PyTorch's own if it is one of those."""
    if isinstance(optimizer, TorchOptimizer):
        return f"{optimizer.kind.__module__}.{optimizer.kind.__qualname__}"
    return type(optimizer).__name__


def _of_rank(name: str, rank: int) -> str:
    """A buffer that one process alone has so."""
    return f"ranks.{rank}.model.{name}"


def _sum_of(value: torch.Tensor) -> str:
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxh3_64_hexdigest(flat.numpy().tobytes())


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
