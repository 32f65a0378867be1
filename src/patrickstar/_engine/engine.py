"""The engine: what a user calls instead of the model and of `loss.backward()`."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar._checkpoint.hf_export import HFExport
from patrickstar._distributed.process_group import World
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import dry_run_engine, forward_backward_step
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine_checkpoint import NOTHING, EngineCheckpoint
from patrickstar._engine.param_init import WeightSource
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._params.precision import cast_inputs
from patrickstar._schedule.coordination import Request
from patrickstar._step.stats import Stats
from patrickstar.config import Config
from patrickstar.errors import ConfigError, ModelError, TrainingError


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
        world: World | None = None,
        **replaced: Any,
    ) -> None:
        self._core = EngineCore(model, config, weights, world=world, **replaced)
        self.optimizer = ChunkOptimizer(self._core)
        self._checkpoint = EngineCheckpoint(self._core, self.optimizer)

    @property
    def config(self) -> Config:
        """The configuration that the engine was made with."""
        return self._core.config

    @property
    def module(self) -> nn.Module:
        """The user's model, its parameters managed."""
        return self._core.module

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._core.device

    @property
    def world(self) -> World | None:
        """The group of processes that share the model, None for one process."""
        return self._core.world

    @property
    def layout(self) -> Layout:
        """Where each parameter is stored: chunk index and offset."""
        return self._core.layout

    @property
    def stats(self) -> Stats:
        """Bytes, peaks and seconds of the last step and of all steps."""
        return self._core.stats

    @property
    def device_budget_bytes(self) -> int:
        """The device tier's budget in bytes."""
        return self._core.device_budget_bytes

    @property
    def host_budget_bytes(self) -> int:
        """The host tier's budget in bytes."""
        return self._core.host_budget_bytes

    # The training loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Inputs are moved to the compute device, floating ones cast to the compute dtype."""
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("a forward")
        self._core.interceptor.abandon()
        self._core.notice_changes()
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        if not torch.is_grad_enabled():
            with self._core.unwound_on_error():
                return self.module(*args, **kwargs)
        self._core.tracer.begin_iteration(self._core.signature(args, kwargs))
        with self._core.unwound_on_error(), self._core.tracer.in_iteration(), ExitStack() as stack:
            if self._core.activation_offload is not None:
                stack.enter_context(self._core.activation_offload.saving())
            out = self.module(*args, **kwargs)
        self._core.data.finish_forward()
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
        self._core.check_open()
        if loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                f"backward needs a scalar loss that depends on a parameter; this one has shape {tuple(loss.shape)} and "
                f"requires_grad={loss.requires_grad}"
            )
        if self._core.gradients.clipped:
            raise TrainingError("gradients were clipped and are final: call clip_grad_norm_ after the last backward")
        self._core.optimizer_in_backward.check_inactive("another backward")
        if update and accumulate:
            raise TrainingError("update=True says that the step comes next, and accumulate=True that it does not")
        if update and self._core.scaler.enabled:
            raise TrainingError(
                "with fp16 no parameter can be updated before all gradients are known not to overflow: leave "
                "update=True out, or use precision='bf16'"
            )
        self._core.interceptor.abandon()
        # Gradients of several processes are complete when all have met, at the step.
        groups = self.optimizer.group_by_managed_param() if update and self.world is None else None
        self._core.interceptor.backward_depth += 1
        self._core.data.begin_backward(accumulate)
        if groups is not None:
            self._core.optimizer_in_backward.begin(groups)
        with self._core.unwound_on_error():
            try:
                with self._core.tracer.in_iteration():
                    self._core.interceptor.open_function_windows(loss)
                    scaled = loss * self._core.scaler.scale if self._core.scaler.enabled else loss
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
            finally:
                self._core.interceptor.backward_depth -= 1
            self._core.interceptor.end_backward()
            self._core.optimizer_in_backward.wait()
            with torch.no_grad():
                self._core.data.op_boundary(belongs=True)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Have the next step scale gradients to a global norm of at most `max_norm`; returns the norm before (fp32).

        The arithmetic is `torch.nn.utils.clip_grad_norm_`'s over fp32 gradients in creation order.
        """
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("clipping")
        with self._core.stopping_on_loss():
            return self._core.gradients.clip(max_norm)

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in fp32; None if it has none."""
        if name not in self._core.by_name:
            raise ModelError(f"the model has no parameter {name!r}")
        self._core.optimizer_in_backward.check_inactive("reading a gradient")
        with self._core.stopping_on_loss():
            self._core.data.synchronize_gradients(Request.STATE)
            with self._core.data.collective_section():
                return self._core.gradients.read(self._core.by_name[name])

    def average(self, value: float | torch.Tensor) -> float:
        """The mean of a number over all processes, added up in the order of ranks in fp64; with one process itself."""
        self._core.check_open()
        number = float(value)
        if self.world is None:
            return number
        with self._core.stopping_on_loss():
            self._core.data.synchronize_processes(Request.AVERAGE)
            found = self.world.all_gather(torch.tensor([number], dtype=torch.float64, device="cpu"))
            total: float = sum(found[:, 0].tolist())
            return total / self.world.size

    def plan(self, *args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> DryRunReport:
        """What a step on such inputs will take, rehearsed without computing anything: seconds, bytes per tier, moves.

        loss: from what the model returns; by default its `loss`, or the output itself. Takes some seconds, in which
        this machine's rates are measured. Raises BudgetError where such a step would not fit.
        """
        if self.world is not None:
            raise ConfigError("a rehearsal is of one process; for several use patrickstar plan --gpus")
        return dry_run_engine(self, forward_backward_step(loss or _loss_of, args, kwargs))

    def close(self, *, keep: bool = True) -> None:
        """Give all chunks back; parameters keep their values as ordinary tensors on the host, in full precision.

        keep: without it they become NaN, for models that memory can't hold.
        Raises DiskError or MoveError, when all is given back, if the disk fails under it and parameters are lost.
        """
        if self._core.release.alive:
            self._core.background_save.wait()
        self._core.model_state.keep_values = keep
        if self._core.release.alive and self.world is not None and keep:
            with self._core.stopping_on_loss():
                self._core.complete()
                self._core.data.synchronize_processes(Request.CLOSE)
                self._core.gradients.drop()
                self._core.model_state.synchronized = True
        lost = self._core.release()
        if lost and keep and (failed := self._core.manager.io_dispatch.failed) is not None:
            failed.add_note(f"{len(lost)} parameters could not be read back and are NaN: {', '.join(lost)}.")
            raise failed

    # State

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers under the model's own names, in full precision, on the host.

        Trained parameters are their fp32 masters; a frozen one has the precision it computes in. Tied names are there
        each, as in `nn.Module.state_dict`, over one tensor.
        names: those wanted, if not all; nothing else is read. Raises ModelError for a name that the model hasn't.
        """
        self._core.check_open()
        with self._core.stopping_on_loss():
            self._core.complete()
            self._core.data.synchronize_processes(Request.STATE)
            with self._core.data.collective_section():
                return self._core.model_state.state_dict(names)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take parameters and buffers back, one after the other.

        strict: without it, what is missing keeps its value. Raises ModelError, before anything changes, when other
        names or shapes differ.
        """
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("loading a state")
        with self._core.stopping_on_loss():
            self._core.complete()
            self._core.background_save.copy_all()
            self._core.data.synchronize_processes(Request.STATE)  # nobody gathers a part of the old one from here on
            self._core.gradients.drop()
            self._core.model_state.load_state_dict(state_dict, strict)

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
        self._core.check_open()
        export = HFExport(self._core.model_state, dtype, max_shard_bytes)
        with self._core.at_work():
            self._core.complete()
            self._core.data.synchronize_processes(Request.STATE)
            with self._core.data.collective_section():
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
        self._core.check_open()
        with self._core.at_work():
            self._checkpoint.start_save(Path(path), state, frozen=frozen)
            if wait:
                self._core.background_save.wait_or_raise()

    def finish_saving(self) -> bool:
        """Wait for a checkpoint that is being written; a failure is a warning. Returns whether there was none."""
        self._core.check_open()
        with self._core.at_work():
            return self._core.background_save.wait()

    def _save(self, path: Path, state: Mapping[str, Any], done: Callable[[], None] | None, wait: bool) -> bool:
        """The same, where a failure to write is a warning. Returns whether there was none."""
        self._core.check_open()
        with self._core.at_work():
            self._checkpoint.start_save(path, state, done)
            return self._core.background_save.wait() if wait else True

    def load(self, path: str | Path, state: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
        """Take a checkpoint back, whatever number of processes, budgets and precision wrote it; returns its `state`.

        What has a `load_state_dict` in `state` is given its own. All processes have to come. Raises CheckpointError,
        before anything changes, if it is damaged or of another model or optimizer.
        """
        self._core.check_open()
        with self._core.at_work():
            return self._checkpoint.load(Path(path), state)


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
            world.abort(error)
        raise
    return engine, engine.optimizer
