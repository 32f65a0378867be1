"""The engine: what a user calls instead of the model and of `loss.backward()`."""

import os
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from patrickstar.engine.adopt import WeightSource, adopt, check_model, make_layout, param_specs, promote, used_together
from patrickstar.engine.blocks import Blocks
from patrickstar.engine.clock import Clock
from patrickstar.engine.config import Config
from patrickstar.engine.early import EarlyUpdate
from patrickstar.engine.export import Export
from patrickstar.engine.gradients import Gradients
from patrickstar.engine.homes import Homes
from patrickstar.engine.intercept import Interceptor, managing
from patrickstar.engine.model_data import ModelData
from patrickstar.engine.offload import ActivationOffload
from patrickstar.engine.optimizer import ChunkOptimizer
from patrickstar.engine.out_of_memory import explain, is_out_of_memory
from patrickstar.engine.parameters import slot_of
from patrickstar.engine.persistence import NOTHING, Persistence
from patrickstar.engine.precision import LossScaler, cast_inputs
from patrickstar.engine.release import release
from patrickstar.engine.shared_data import SharedModelData
from patrickstar.engine.sharing import agreed_layout, share_buffers, shared_data
from patrickstar.engine.slot import Slot
from patrickstar.engine.state import ModelState
from patrickstar.engine.stats import Stats
from patrickstar.engine.tiers import budgets, plan_tiers
from patrickstar.engine.update import Update
from patrickstar.errors import ConfigError, DiskError, ModelError, MoveError, TrainingError
from patrickstar.kernels.choice import Kernels
from patrickstar.layout.mapping import Layout
from patrickstar.memory.hardware import Hardware
from patrickstar.memory.manager import Manager
from patrickstar.memory.meter import Meter
from patrickstar.memory.scratch import PAGE_BYTES
from patrickstar.parallel.world import World
from patrickstar.schedule.prefetch import NextUseAhead, OnDemand, Prefetch
from patrickstar.schedule.rounds import Want

if TYPE_CHECKING:
    from patrickstar.engine.forecast import Forecast


class Engine:
    """A model under management. Call it like the model; then `backward(loss)` and the optimizer's `step()`.

    Raises BudgetError before anything moves when the model data can't fit, ModelError naming a parameter that can't be
    managed. `evict_everything` and `poison` are for tests: evict whatever may leave at every access, and fill what is
    freed with NaN; `meter` replaces the measurement of non-model data, `kernels` what updates, `policy` what comes
    ahead of need; `page_bytes` is what moves to and from a disk at once; `hardware` is what tiers are made of;
    `world` is the processes that share the model, which `initialize` finds.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        config: Config,
        weights: WeightSource | None = None,
        *,
        meter: Meter | None = None,
        kernels: Kernels | None = None,
        evict_everything: bool = False,
        poison: bool = False,
        policy: type[Prefetch] | None = None,
        page_bytes: int = PAGE_BYTES,
        hardware: Hardware | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world
        hardware = hardware if hardware is not None else Hardware(config.find_device())
        self.device = hardware.device
        hardware.start()
        meter = meter if meter is not None else hardware.meter()
        # Before budgets are made: what libraries load is no longer free then. A meter that counts nothing counts no
        # workspaces either.
        library_bytes = min(hardware.library_bytes(config.compute_dtype), meter.now(0))
        sharing = 1 if world is None else len(world.on_this_host)
        memory = budgets(config, hardware, sharing, several=world is not None)
        self.device_budget_bytes, self.host_budget_bytes = memory
        for_chunks = max(0, self.device_budget_bytes - library_bytes)
        self.module = model if isinstance(model, nn.Module) else model()
        check_model(self.module, self.device)
        params = param_specs(self.module, config)
        if world is None:
            self.layout: Layout = make_layout(params, config, for_chunks)
        else:
            self.layout = agreed_layout(world, self.module, params, config, for_chunks)
        together = used_together(self.module)
        tiers = plan_tiers(config, self.layout, together, memory, hardware, page_bytes, sharing, library_bytes)
        # A GPU's host slab is locked as a whole, so it begins no larger than what is sure to be in it.
        needed = self.layout.model_data_bytes + tiers.staging_bytes
        self._manager = Manager(
            self.device,
            *memory,
            poison,
            disk=tiers.disk,
            slab_bytes=needed if hardware.beside else None,
            hardware=hardware,
        )
        self._manager.evict_everything = evict_everything
        self._manager.compute.non_model_bytes = library_bytes
        self._clock = Clock(self._manager, meter, policy or (NextUseAhead if world is not None else None))
        self._data = ModelData(self._manager, self._clock)
        if world is not None:
            self._data = shared_data(world, self.layout, self._manager, self._clock, config)
        self._scaler = LossScaler(config.precision == "fp16")
        self._kernels = kernels if kernels is not None else Kernels.best(self.device)
        self._gradients = Gradients(self._data, self._scaler, self._kernels)
        self._state = ModelState(self.module, self._data)
        self._update = Update(self._data, config.optimizer, self._kernels, tiers.ring)
        if self._update.pipeline is not None:
            self._update.pipeline.ahead = policy is not OnDemand
        if isinstance(self._data, SharedModelData):
            self._data.complete = self._update.complete
        self._homes = Homes(self.layout, self._data, self._update, self._clock)
        self._early = EarlyUpdate(self._data, self._update)
        self._interceptor = Interceptor(self._data, self._early, self._scaler.enabled)
        self._offload = ActivationOffload(self._manager) if config.activation_offload else None
        try:
            with managing():
                adopt(self.module, self.layout, tiers.placement, params, self._data, self._interceptor, weights)
        except BaseException:
            self._interceptor.close()
            self._state.release()
            raise
        if world is not None:
            share_buffers(world, self.module)
        self._move_buffers()
        self._clock.calibrate()
        self._homes.begin(tiers.placement)
        self._by_name = {slot.name: slot for slot in self._data.slots}
        self._blocks = Blocks(self._interceptor)
        self._blocks.notice(self.module)
        self._release = weakref.finalize(self, release, self._interceptor, self._blocks, self._state)
        self._release.atexit = False
        self._interceptor.release = self._release
        self.stats = Stats(_retries=hardware.allocator_stats().retries)
        self.optimizer = ChunkOptimizer(self)
        self._persistence = Persistence(self)

    # The training loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Inputs are moved to the compute device, floating ones cast to the compute dtype."""
        self._check_open()
        self._early.check("a forward")
        self._interceptor.abandon()
        self._notice_changes()
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        if not torch.is_grad_enabled():
            with self._unwound_on_error():
                return self.module(*args, **kwargs)
        self._clock.begin_iteration(self._signature(args, kwargs))
        with self._unwound_on_error(), self._clock.iterating(), ExitStack() as stack:
            if self._offload is not None:
                stack.enter_context(self._offload.saving())
            out = self.module(*args, **kwargs)
        self._data.reset_after_forward()
        return out

    def train(self, mode: bool = True) -> "Engine":
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Set the model's evaluation mode."""
        return self.train(False)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, *, update: bool = False, accumulate: bool = False
    ) -> None:
        """Compute gradients of a scalar loss, scaled for fp16. Several calls before a step accumulate.

        update: the step comes next, with nothing before it: no clipping, no look at gradients, no change of the
        learning rate. Then chunks are updated while backward goes on, as soon as their gradients are there.
        accumulate: another backward comes before the step. It makes a difference with several processes alone: each
        adds up its own gradients in fp32, in 4 bytes per parameter on the host, and they are averaged once, in the
        backward without it. Left out, they are averaged in every backward, and take 4 bytes per parameter of them all.
        """
        self._check_open()
        if loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                f"backward needs a scalar loss that depends on a parameter; this one has shape {tuple(loss.shape)} and "
                f"requires_grad={loss.requires_grad}"
            )
        if self._gradients.clipped:
            raise TrainingError("gradients were clipped and are final: call clip_grad_norm_ after the last backward")
        self._early.check("another backward")
        if update and accumulate:
            raise TrainingError("update=True says that the step comes next, and accumulate=True that it does not")
        if update and self._scaler.enabled:
            raise TrainingError(
                "with fp16 no parameter can be updated before all gradients are known not to overflow: leave "
                "update=True out, or use precision='bf16'"
            )
        self._interceptor.abandon()
        # Gradients of several processes are complete when all have met, at the step.
        groups = self.optimizer.group_by_slot() if update and self.world is None else None
        self._interceptor.backward_depth += 1
        self._data.begin_backward(accumulate)
        if groups is not None:
            self._early.begin(groups)
        with self._unwound_on_error():
            try:
                with self._clock.iterating():
                    self._interceptor.follow_functions(loss)
                    scaled = loss * self._scaler.scale if self._scaler.enabled else loss
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
            finally:
                self._interceptor.backward_depth -= 1
            self._interceptor.end_backward()
            self._early.wait()
            with torch.no_grad():
                self._data.boundary(belongs=True)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Have the next step scale gradients to a global norm of at most `max_norm`; returns the norm before (fp32).

        The arithmetic is `torch.nn.utils.clip_grad_norm_`'s over fp32 gradients in creation order.
        """
        self._check_open()
        self._early.check("clipping")
        with self._stopping_on_loss():
            return self._gradients.clip(max_norm)

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in fp32; None if it has none."""
        if name not in self._by_name:
            raise ModelError(f"the model has no parameter {name!r}")
        self._early.check("reading a gradient")
        with self._stopping_on_loss():
            self._data.meet_gradients(Want.STATE)
            with self._data.together():
                return self._gradients.read(self._by_name[name])

    def average(self, value: float | torch.Tensor) -> float:
        """The mean of a number over all processes, added up in the order of ranks in fp64; with one process itself."""
        self._check_open()
        number = float(value)
        if self.world is None:
            return number
        with self._stopping_on_loss():
            self._data.meet(Want.AVERAGE)
            found = self.world.collect(torch.tensor([number], dtype=torch.float64, device="cpu"))
            total: float = sum(found[:, 0].tolist())
            return total / self.world.size

    def plan(self, *args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> "Forecast":
        """What a step on such inputs will take, rehearsed without computing anything: seconds, bytes per tier, moves.

        loss: from what the model returns; by default its `loss`, or the output itself. Takes some seconds, in which
        this machine's rates are measured. Raises BudgetError where such a step would not fit.
        """
        from patrickstar.engine.rehearsal import forecast, forward_backward_step

        if self.world is not None:
            raise ConfigError("a rehearsal is of one process; for several use patrickstar plan --gpus")
        return forecast(self, forward_backward_step(loss or _loss_of, args, kwargs))

    def close(self, *, keep: bool = True) -> None:
        """Give all chunks back; parameters keep their values as ordinary tensors on the host, in full precision.

        keep: without it they become NaN, for models that memory can't hold.
        Raises DiskError or MoveError, when all is given back, if the disk fails under it and parameters are lost.
        """
        if self._release.alive:
            self._persistence.end()
        self._state.keep = keep
        if self._release.alive and self.world is not None and keep:
            with self._stopping_on_loss():
                self._complete()
                self._data.meet(Want.CLOSE)
                self._gradients.drop()
                self._state.complete = True
        lost = self._release()
        if lost and keep and (failed := self._manager.transit.failed) is not None:
            failed.add_note(f"{len(lost)} parameters could not be read back and are NaN: {', '.join(lost)}.")
            raise failed

    # State

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers under the model's own names, in full precision, on the host.

        Trained parameters are their fp32 masters; a frozen one has the precision it computes in. Tied names are there
        each, as in `nn.Module.state_dict`, over one tensor.
        names: those wanted, if not all; nothing else is read. Raises ModelError for a name that the model hasn't.
        """
        self._check_open()
        with self._stopping_on_loss():
            self._complete()
            self._data.meet(Want.STATE)
            with self._data.together():
                return self._state.state_dict(names)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take parameters and buffers back, one after the other.

        strict: without it, what is missing keeps its value. Raises ModelError, before anything changes, when other
        names or shapes differ.
        """
        self._check_open()
        self._early.check("loading a state")
        with self._stopping_on_loss():
            self._complete()
            self._persistence.copy_all()
            self._data.meet(Want.STATE)  # nobody gathers a part of the old one from here on
            self._gradients.drop()
            self._state.load_state_dict(state_dict, strict)

    def save_pretrained(
        self, directory: str | Path, *, dtype: str | None = None, max_shard_bytes: int | str = "5GB"
    ) -> None:
        """Write the model to a new folder, safetensors and config.json, which transformers' `from_pretrained` loads.

        Parameters and persistent buffers, tied ones once, streamed: no second copy of the model is made. dtype: "fp32",
        "bf16" or "fp16" for all floating parameters; None is full precision, and the precision it computes in for a
        frozen one. In the dtype of the engine's precision these are the very bits that operators read.
        max_shard_bytes: the most that a file holds, unless one tensor is larger. With several processes all have to
        come, and rank 0 writes. The folder appears when it is complete. Raises CheckpointError, with nothing left
        behind, for one that is there and not empty, or if the disk is full; the engine goes on.
        """
        self._check_open()
        export = Export(self._state, dtype, max_shard_bytes)
        with self._at_work():
            self._complete()
            self._data.meet(Want.STATE)
            with self._data.together():
                failed = export.write(Path(directory))
        if failed is not None:
            raise failed

    def save(
        self, path: str | Path, state: Mapping[str, Any] = NOTHING, *, wait: bool = True, frozen: bool = True
    ) -> None:
        """Write a checkpoint to `path`, a new folder, which is complete or not there. All processes have to come.

        It holds all that a run needs to go on with the same bits, in full precision: parameters, the optimizer's
        states and param groups, the loss scale, buffers and random generators. state: what else belongs to the run, by
        name: plain data, or anything with a `state_dict` of plain data (a scheduler, a data loader). wait: without it
        training goes on meanwhile; a failure is then a warning in a later step. frozen: without it frozen parameters
        are left out, and a load leaves them as they are. Raises CheckpointError, and leaves nothing behind, if there is
        something at `path`, the disk is full, or the state is not plain.
        """
        self._check_open()
        with self._at_work():
            self._persistence.begin(Path(path), state, frozen=frozen)
            if wait:
                self._persistence.finish()

    def finish_saving(self) -> bool:
        """Wait for a checkpoint that is being written; a failure is a warning. Returns whether there was none."""
        self._check_open()
        with self._at_work():
            return self._persistence.end()

    def _save(self, path: Path, state: Mapping[str, Any], done: Callable[[], None] | None, wait: bool) -> bool:
        """The same, where a failure to write is a warning. Returns whether there was none."""
        self._check_open()
        with self._at_work():
            self._persistence.begin(path, state, done)
            return self._persistence.end() if wait else True

    def load(self, path: str | Path, state: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
        """Take a checkpoint back, whatever number of processes, budgets and precision wrote it; returns its `state`.

        What has a `load_state_dict` in `state` is given its own. All processes have to come. Raises CheckpointError,
        before anything changes, if it is damaged or of another model or optimizer.
        """
        self._check_open()
        with self._at_work():
            return self._persistence.load(Path(path), state)

    # What the optimizer asks for

    def _step(self, groups: Mapping[Slot, Mapping[str, Any]]) -> None:
        self._check_open()
        self._persistence.look()
        self._interceptor.abandon()
        if self._clock.end_iteration():
            self._homes.follow_traces(self.layout)
        manager = self._manager
        manager.compute.comfort_bytes = manager.compute.budget_bytes
        with self._at_work():
            self._early.finish(groups)
            self._data.meet_gradients(Want.STEP)
            overflow = self._gradients.overflowed()
            if not overflow:
                self._update.run(groups.get, self._gradients.scales)
            self._data.close_step(() if overflow else groups)
            self._gradients.drop()
            self._data.settle_embeddings()
        if self._data.end_step():
            self._homes.follow_traces(self.layout)
        self._scaler.update(overflow)
        peak = max(self._clock.non_model_peak, self._clock.trace.peak_non_model_bytes)
        self.stats.close_step(manager, overflow, self._scaler.scale, peak)
        self._clock.non_model_peak = 0

    def _drop_gradients(self) -> None:
        self._check_open()
        self._early.check("dropping gradients")
        with self._stopping_on_loss():
            self._data.meet_to_drop()
            self._gradients.drop()

    def _complete(self) -> None:
        """What a step has begun is done."""
        with self._at_work():
            self._update.complete()

    # Inside

    def _notice_changes(self) -> None:
        """Parameters replaced since the last call are refused; those no longer frozen get the lists of trained ones."""
        self._blocks.notice(self.module)
        with torch._C.DisableTorchFunctionSubclass():
            thawed = []
            for name, param in self.module.named_parameters():
                slot = slot_of(param)
                if slot is None:
                    raise ModelError(
                        f"parameter {name!r} was replaced or added after ps.initialize, so the engine does not hold "
                        f"it; write into the old one under torch.no_grad(), or initialize again"
                    )
                if param.requires_grad and not slot.scheme.trained:
                    thawed.append(slot)
            if thawed:
                self._complete()
                self._persistence.copy_all()
                if self._clock.open_key is not None:
                    raise ModelError(
                        f"parameter {thawed[0].name!r} was unfrozen in the middle of a step, when graphs that know it "
                        f"frozen may be alive; unfreeze between optimizer.step() and the next forward"
                    )
                with managing():
                    states = self.config.optimizer.states
                    self.layout = promote(thawed, self.layout, self._data, self._interceptor, states)
                self._clock.forget()

    def _signature(self, args: Any, kwargs: Any) -> Hashable:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return shapes, self.module.training

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """While the engine computes on parameters by itself: nothing is recorded or intercepted."""
        with self._stopping_on_loss(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            yield

    @contextmanager
    def _stopping_on_loss(self) -> Iterator[None]:
        """When a disk or a thread has failed, and bytes of chunks are lost, give all back and close the engine."""
        grad = torch.is_grad_enabled()
        try:
            yield
        except (DiskError, MoveError) as error:
            self._interceptor.stop(error)
            raise
        except KeyboardInterrupt:
            torch.set_grad_enabled(grad)  # it may have struck a `no_grad` while that ended
            raise

    @contextmanager
    def _unwound_on_error(self) -> Iterator[None]:
        """After an exception nothing is pinned and no window is open; the engine goes on."""
        try:
            with self._stopping_on_loss():
                yield
        except (DiskError, MoveError):
            raise
        except BaseException as error:
            self._interceptor.window = None
            self._interceptor.unseen.clear()
            self._early.abandon()
            self._data.drop_uses()
            self._data.follow_moves()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._data.finish_gradients()
            self._clock.abandon()
            if is_out_of_memory(error):
                raise explain("an operator", self._data, error) from error
            raise

    def _move_buffers(self) -> None:
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise TrainingError("this engine was closed; call ps.initialize for a new one")
        if os.getpid() != self._state.process:
            raise TrainingError(
                f"this engine's chunks are in the memory of process {self._state.process}, which its child "
                f"{os.getpid()}, made by fork(), does not have: use the engine in the process that made it, and give "
                f"the child copies of what it needs (engine.state_dict())"
            )


def _loss_of(out: Any) -> Any:
    return getattr(out, "loss", out)


def initialize(
    model: nn.Module | Callable[[], nn.Module], config: Config | None = None, weights: WeightSource | None = None
) -> tuple[Engine, ChunkOptimizer]:
    """Put a model under management: returns the engine to call in its place, and the optimizer.

    model: what builds the `nn.Module`, or the module itself. weights: gives values by parameter name for parameters
    on the meta device. Where torchrun has started several processes, or the script has joined them by
    `torch.distributed.init_process_group`, each gets a part of the model data, and all have to come here. Raises
    ConfigError, DeviceError, ModelError or BudgetError before the first step.
    """
    config = config if config is not None else Config()
    world = World.find(config.find_device())
    try:
        engine = Engine(model, config, weights, world=world)
    except BaseException as error:
        if world is not None:
            world.give_up(error)
        raise
    return engine, engine.optimizer
