"""User-facing engine: forward, backward, optimizer, state and checkpoints of a managed model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar._checkpoint.hf_export import HFExport
from patrickstar._distributed.process_group import Processes
from patrickstar._distributed.single_process import SINGLE_PROCESS
from patrickstar._dry_run.precision_choice import settle_precision, warn_of_slow_precision
from patrickstar._engine.averaging import averaged
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine_call import engine_call
from patrickstar._engine.inspection import Inspection, inspect
from patrickstar._engine.lost_digits import warn_of_lost_digits
from patrickstar._engine.param_init import WeightSource
from patrickstar._engine.recording import Recording
from patrickstar._engine.run_log import RunLog
from patrickstar._hardware.sigint_gate import interruptible
from patrickstar._layout.byte_size import format_size
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._params.precision import cast_inputs
from patrickstar._schedule.coordination import Request
from patrickstar._step.stats import Stats
from patrickstar.config import Config
from patrickstar.errors import ModelError, TrainingError

if TYPE_CHECKING:
    # On first use: dry runs, and torch.distributed.checkpoint would add 0.8 s to `import patrickstar`.
    from patrickstar._dry_run.report import DryRunReport
    from patrickstar._engine.engine_checkpoint import EngineCheckpoint


class Engine:
    """Model whose parameters, gradients and optimizer states are stored in chunks under memory budgets.

    Call the engine like the model, then `backward(loss)` and `optimizer.step()`. Create it with `initialize`, which
    documents `model`, `config`, `weights` and the errors. `world` is the group of processes that share the model;
    further keyword arguments replace internal parts for tests and dry runs, see `EngineCore`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        config: Config,
        weights: WeightSource | None = None,
        *,
        world: Processes = SINGLE_PROCESS,
        mesh: Any = None,
        **overrides: Any,
    ) -> None:
        if config.precision == "auto":  # `initialize` has chosen, since it checks what fits before
            config = settle_precision(config, model, config.find_device(), world)
        self._core = EngineCore(model, config, weights, world=world, mesh=mesh, **overrides)
        if "hardware" not in overrides and not world.rank:  # a dry run's is of another machine
            warn_of_slow_precision(config, self._core.module, self._core.device)
        self.optimizer = ChunkOptimizer(self._core)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TrainingError(
            "an engine can't be pickled or copied, since its chunks are on several tiers: save it with "
            "engine.save(path), or copy engine.module"
        )

    @property
    def _torchdynamo_orig_callable(self) -> Any:
        """Refuse `torch.compile(engine)`, which asks for this attribute: it would trace the transfers of chunks."""
        raise ModelError(
            "torch.compile can't compile an engine, since transfers run between the operators: compile the model with "
            "engine.module.compile(), or its blocks one by one, and call the engine"
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine; after an exception without keeping the values of the parameters."""
        self.close(keep=error is None)

    @property
    def config(self) -> Config:
        """Configuration that the engine was created with; what "auto" becomes is in its place."""
        return self._core.config

    @property
    def module(self) -> nn.Module:
        """The user's model, whose parameters are managed."""
        return self._core.module

    @property
    def device(self) -> torch.device:
        """Compute device."""
        return self._core.device

    @property
    def world(self) -> Processes:
        """Processes that share the model, with `rank` and `size`."""
        return self._core.world

    @property
    def data_size(self) -> int:
        """Number of distinct batches in a step: that of the processes, unless operators shard a batch over several."""
        return self._core.distribution.mesh.size

    @property
    def data_rank(self) -> int:
        """Number of the batch that this process computes, below `data_size`."""
        return self._core.distribution.mesh.batch_of[self.world.rank]

    @property
    def layout(self) -> Layout:
        """Chunk index and offset of each parameter."""
        return self._core.layout

    @property
    def stats(self) -> Stats:
        """Bytes, peaks and seconds of the last step and of all steps."""
        return self._core.stats

    @property
    def device_budget_bytes(self) -> int:
        """Budget of the device tier in bytes."""
        return self._core.device_budget_bytes

    @property
    def host_budget_bytes(self) -> int:
        """Budget of the host tier in bytes."""
        return self._core.host_budget_bytes

    def __repr__(self) -> str:
        core, config = self._core, self.config
        numel = sum(managed.numel for managed in core.shards.managed_params)
        disk = "" if config.disk is None else f", disk {config.disk.directory}"
        budgets = f"device {format_size(core.device_budget_bytes)}, host {format_size(core.host_budget_bytes)}{disk}"
        ranks = f", rank {self.world.rank} of {self.world.size}" if self.world.size > 1 else ""
        closed = ", closed" if core.closed else ""
        return (
            f"Engine({type(self.module).__name__}, {numel:,} parameters, {config.precision} on {core.device}, "
            f"{budgets}{ranks}, step {core.stats.total.steps}{closed})"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return an iterator over the model's parameters. `recurse`: include those of submodules."""
        return self.module.parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the model's parameters with their names.

        Args:
            prefix: Beginning of all names.
            recurse: Include the parameters of submodules.
        """
        return self.module.named_parameters(prefix, recurse)

    def inspect(self) -> Inspection:
        """Return a snapshot of where everything is: tiers, chunks, parameters, the last trace and the loss scale.

        It starts no transfers and waits only for calls of other threads: call it at any time, also on a closed engine.
        `stats` has statistics.
        """
        return inspect(self._core)

    def record(
        self, log: RunLog | str | Path | None = None, *, steps: int = 0, tensorboard: str | Path | None = None
    ) -> Recording:
        """Record the steps inside the returned context, for `patrickstar report`, for TensorBoard and for Perfetto.

        Each step has a record of its statistics. The first, second, fourth, eighth step and so on have a timeline, too:
        when each channel was busy, what was waited for, and where the bytes were. Beside an accelerator these steps
        wait for it at their begin and end.

        Args:
            log: File of JSON lines, which is written step by step. Default: none.
            steps: Number of steps of a log that are continued; the rest of the file is replaced.
            tensorboard: Directory for scalars of each step in TensorBoard's format. Default: none.

        Returns:
            Context with `log(loss=...)` to add to the record of a step, `timelines`, and `chrome_trace(path)`.

        Raises:
            ConfigError: A file can't be written, or TensorBoard is not installed.
            TrainingError: The engine is closed, or is being recorded.
        """
        return Recording(self._core, self.optimizer, log, steps, tensorboard)

    def plan(self, *args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> "DryRunReport":
        """Predict the cost of a training step by a dry run. Nothing is computed; measuring the machine takes seconds.

        Gradients are clipped in it as in the last step: not at all, without effect, or with effect. With several
        processes all must call it; the first one runs it for its budgets and inputs, and all get a report. Inside
        `record` the prediction becomes a part of the log, and the report compares it with the steps.

        Args:
            *args: Inputs of the model, of the shapes and dtypes to plan for.
            loss: Returns the loss from the model's output. Default: its attribute `loss`, or the output itself.
            **kwargs: Further inputs, by keyword.

        Returns:
            Report with seconds per step, bytes per tier and transferred bytes.

        Raises:
            BudgetError: Such a step would not fit.
            ConfigError: Parameters are DTensors, whose operators communicate.
        """
        from patrickstar._engine.engine_plan import plan_step

        return plan_step(self, self._core, loss, args, kwargs)

    # The training loop

    @engine_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward.

        Args:
            *args: Inputs. Tensors are moved to the device, floating-point ones cast to the compute dtype.
            **kwargs: Further inputs, by keyword.

        Returns:
            Output of the model.

        Raises:
            ModelError: A parameter was replaced or added, or was unfrozen in the middle of a step.
            TrainingError: The engine is closed, or `backward(update=True)` was not followed by a step.
        """
        core = self._core
        core.check_open()
        core.optimizer_in_backward.check_inactive("a forward")
        core.sync_module_changes()
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        key = core.signature(args, kwargs)
        if not torch.is_grad_enabled():
            with core.cleanup_on_error(), core.data.residency.evaluation(key), interruptible():
                return self.module(*args, **kwargs)
        if self.config.activation_checkpointing == "auto":
            from patrickstar._engine.activation_choice import choose_activations

            choose_activations(self, core, args, kwargs)
        with core.cleanup_on_error(), core.tracer.in_iteration(), ExitStack() as stack:
            core.begin_iteration(key, (args, kwargs))
            core.manager.begin_phase("forward")
            if core.activation_offload is not None:
                stack.enter_context(core.activation_offload.saving(key))
            with interruptible():
                out = self.module(*args, **kwargs)
        core.data.finish_forward()
        return out

    @engine_call
    def call_frozen(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a frozen module without gradients.

        Args:
            name: Name that `initialize(frozen=...)` gave it.
            *args: Inputs. Tensors are moved to the device, floating-point ones cast to the compute dtype.
            **kwargs: Further inputs, by keyword.

        Returns:
            Output of the module.

        Raises:
            ModelError: There is no such module.
            TrainingError: The engine is closed.
        """
        core = self._core
        core.check_open()
        if name not in core.frozen:
            raise ModelError(f"the engine has no frozen module {name!r}, only {sorted(core.frozen)}")
        core.sync_module_changes()
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        of_step = core.tracer.open_key is not None  # then it is a part of the step's trace
        evaluation = core.data.residency.evaluation((name, core.signature(args, kwargs)))
        part = core.tracer.in_iteration() if of_step else evaluation
        with torch.no_grad(), core.cleanup_on_error(), part, interruptible():
            return core.frozen[name](*args, **kwargs)

    @engine_call
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the `generate` method of a transformers model, without gradients.

        Args:
            *args: Its arguments. Tensors are moved to the device.
            **kwargs: Its keyword arguments.

        Returns:
            What the method returns.

        Raises:
            ModelError: The model has no such method.
            TrainingError: The engine is closed.
        """
        self._core.check_open()
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise ModelError(f"{type(self.module).__name__} has no method generate")
        args, kwargs = cast_inputs((args, kwargs), self.config.compute_dtype, self.device)
        with torch.no_grad(), self._core.cleanup_on_error(), interruptible():
            return generate(*args, **kwargs)

    def train(self, mode: bool = True) -> "Engine":
        """Set the training mode of the model to `mode`, and return the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Set the evaluation mode of the model and return the engine."""
        return self.train(False)

    @engine_call
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, *, update: bool = False, accumulate: bool = False
    ) -> None:
        """Compute the gradients of a loss. Several calls before a step accumulate.

        Args:
            loss: Scalar. With fp16 it is multiplied by the loss scale first.
            retain_graph: Keep the autograd graph for another backward.
            update: Update each chunk during backward, as soon as its gradients are complete (optimizer-in-backward).
                `optimizer.step()` must be the next call: no clipping, no reading of gradients, no change of
                hyper-parameters in between. With several processes only updates into spare memory begin early.
            accumulate: Another backward precedes the step. Has an effect only with several processes: each sums its
                gradients in fp32 on the host (4 bytes per parameter of the whole model), and the last backward averages
                them once. If False, every backward averages; the sums take 4 bytes per parameter, sharded.

        Raises:
            TrainingError: The loss or the options are invalid, gradients are already clipped, or the engine is closed.
        """
        self._core.check_open()
        if loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                f"backward needs a scalar loss that depends on a parameter; this one has shape {tuple(loss.shape)} and "
                f"requires_grad={loss.requires_grad}"
            )
        self._core.gradients.check_scaled()
        if self._core.gradients.clipped:
            raise TrainingError("gradients were clipped and are final: call clip_grad_norm_ after the last backward")
        self._core.optimizer_in_backward.check_inactive("another backward")
        update |= self._core.config.updates_in_backward
        if update and accumulate:
            option = self._core.optimizer_in_backward.option
            raise TrainingError(f"{option} promises that the step comes next, accumulate=True another backward")
        if update and self._core.scaler.enabled:
            raise TrainingError(
                "with fp16 no parameter can be updated before all gradients are known to be finite: leave out "
                "update=True, or use precision='bf16'"
            )
        self._core.background_save.begin()
        # Another process may gather parameters until all have synchronized, at the step: updates must not replace them.
        # A delayed update runs beside the next step anyway, and one of all parameters needs all gradients.
        step = self._core.optimizer_step
        in_backward = update and self.world.size == 1 and not step.next_is_late and step.together is None
        groups = self.optimizer.group_by_managed_param() if in_backward else None
        self._core.interceptor.gradient_hooks.move_last()
        self._core.interceptor.gradient_hooks.backward_depth += 1
        self._core.manager.begin_phase("backward")
        self._core.data.begin_backward(accumulate)
        if groups is not None:
            self._core.optimizer_in_backward.begin(groups)
        else:
            self._core.begin_speculation(self.optimizer.managed_groups, self.optimizer.param_groups, promised=update)
        with self._core.cleanup_on_error():
            holds = self._core.interceptor.lock.begin_backward()
            try:
                with self._core.tracer.in_iteration():
                    self._core.interceptor.open_function_windows(loss)
                    scaled = loss * self._core.scaler.scale if self._core.scaler.enabled else loss
                    with interruptible():
                        torch.autograd.backward(scaled, retain_graph=retain_graph)
            finally:
                self._core.interceptor.gradient_hooks.backward_depth -= 1
                self._core.interceptor.lock.end_backward(holds)
            self._core.interceptor.end_backward()
            with torch.no_grad():
                self._core.data.op_boundary(belongs=True)

    def step(self) -> None:
        """Run `optimizer.step()`: the call of Angel-PTM's and DeepSpeed's engines."""
        self.optimizer.step()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global gradient norm, like `torch.nn.utils.clip_grad_norm_` over fp32 gradients in creation order.

        The next step scales the gradients; no further backward is possible before it. With several processes all must
        call it.

        Args:
            max_norm: Upper bound of the global norm.
            norm_type: Order of the norm; `math.inf` for the largest absolute value. Orders other than 2 read every
                gradient whole.
            error_if_nonfinite: Refuse a norm that is infinite or NaN. Nothing is clipped then.

        Returns:
            The norm before clipping: an fp32 scalar on the compute device.

        Raises:
            TrainingError: The norm is not finite, `backward(update=True)` has already updated parameters, or the engine
                is closed.
        """
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("clipping")
        with self._core.close_on_data_loss():
            return self._core.gradients.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def gradient(self, name: str) -> torch.Tensor | None:
        """Copy the gradient that the next step will apply to a parameter, without loss scale and after clipping.

        Args:
            name: Name of the parameter, as in `named_parameters`.

        Returns:
            Tensor of the parameter's shape and of its master's dtype, on the compute device; None without a gradient.

        Raises:
            ModelError, TrainingError: The name is unknown, or `backward(update=True)` has used up the gradient.
        """
        if name not in self._core.by_name:
            raise ModelError(f"the model has no parameter {name!r}")
        self._core.optimizer_in_backward.check_inactive("reading a gradient")
        with self._core.close_on_data_loss():
            return self._core.gradients.read(self._core.by_name[name])

    def average(self, value: float | torch.Tensor) -> float:
        """Return the mean of `value`, a number or one-element tensor, over all processes: an fp64 sum in rank order."""
        self._core.check_open()
        value = float(value)  # raises before other processes are waited for
        with self._core.close_on_data_loss():
            self._core.sharing.synchronize_processes(Request.AVERAGE)
            with interruptible():
                gathered = self.world.all_gather(torch.tensor([value], dtype=torch.float64, device="cpu"))
            return float(sum(gathered[:, 0].tolist()) / self.world.size)

    # State

    @cached_property
    def _checkpoint(self) -> "EngineCheckpoint":
        from patrickstar._engine.engine_checkpoint import EngineCheckpoint

        return EngineCheckpoint(self._core, self.optimizer)

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Copy parameters and persistent buffers to the host, under the names of `nn.Module.state_dict`.

        Args:
            names: Entries to read. Default: all.

        Returns:
            CPU tensors by name: fp32 masters, frozen parameters in their compute dtype. Tied names share one tensor.

        Raises:
            ModelError: The model has no entry of a given name.
        """
        self._core.check_open()
        self._core.interceptor.data_attribute.check(self._core.interceptor, writes=False)
        with self._core.close_on_data_loss():
            self._core.complete()
            self._core.sharing.synchronize_processes(Request.STATE)
            with self._core.sharing.collective_section():
                return self._core.model_state.state_dict(names)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load parameters and buffers, one after the other, and discard gradients.

        Args:
            state_dict: Tensors by name, as `state_dict` returns them, in any floating-point dtype. DTensors are
                gathered one at a time.
            strict: If False, entries missing in `state_dict` keep their values; unknown names are still refused.

        Raises:
            ModelError: Names or shapes differ. Nothing has been changed.
        """
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("loading a state")
        with self._core.close_on_data_loss():
            self._core.complete()
            self._core.flush()
            self._core.background_save.copy_all()
            self._core.sharing.synchronize_processes(Request.STATE)  # from here on no process gathers old values
            self._core.gradients.drop()
            self._core.model_state.load_state_dict(state_dict, strict)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are their averages, to evaluate or save them.

        It needs the optimizer `EMA` or `ScheduleFreeAdamW`. Parameters and averages are exchanged on entry and on exit,
        one at a time. With several processes all must enter it.

        Returns:
            The context. Inside, steps and checkpoints are refused; `state_dict` and `save_pretrained` give averages.

        Raises:
            ConfigError: The optimizer keeps no average.
            TrainingError: Gradients are stored, or the engine is closed.
        """
        self._core.check_open()
        return averaged(self._core, self.optimizer.managed_groups())

    def save_pretrained(
        self, directory: str | Path, *, dtype: str | None = None, max_shard_bytes: int | str = "5GB"
    ) -> None:
        """Write a model folder that transformers' `from_pretrained` loads: safetensors files and config.json.

        Collective: every process must call it, and rank 0 writes. Tensors are streamed without a second copy of the
        model; the folder appears when it is complete.

        Args:
            directory: New or empty folder.
            dtype: "fp32", "bf16" or "fp16" for all floating-point parameters; in the engine's precision this gives the
                exact bits that operators read. None: full precision, frozen parameters in their compute dtype.
            max_shard_bytes: Largest file, in bytes or as a size such as "5GB"; a larger tensor gets its own file.

        Raises:
            CheckpointError: The folder is not empty, or writing failed. Nothing is left behind; training can continue.
            ConfigError, ModelError: An argument is invalid, or the model cannot be exported.
        """
        self._core.check_open()
        self._core.interceptor.data_attribute.check(self._core.interceptor, writes=False)
        export = HFExport(self._core.model_state, dtype, max_shard_bytes)
        with self._core.internal_computation():
            self._core.complete()
            self._core.sharing.synchronize_processes(Request.STATE)
            with self._core.sharing.collective_section():
                failed = export.write(Path(directory))
        if failed is not None:
            raise failed

    def save(
        self, path: str | Path, state: Mapping[str, Any] | None = None, *, wait: bool = True, frozen: bool = True
    ) -> None:
        """Write a checkpoint from which training resumes with identical bits. Every process must call it.

        The checkpoint contains parameters, optimizer states and param groups in full precision, the loss scale,
        buffers and random generator states.

        Args:
            path: New folder; it appears when the checkpoint is complete.
            state: Further state by name: plain data, or objects with a `state_dict` of plain data (a scheduler).
            wait: If False, write in the background while training continues; a failure is a warning in a later step.
            frozen: If False, leave out frozen parameters; loading then leaves them unchanged.

        Raises:
            CheckpointError: `path` exists, writing failed, or `state` is not plain data; nothing is left behind.
            TrainingError: No step has used the gradients yet, or the engine is closed.
        """
        self._core.check_open()
        self._core.check_not_averaged("a checkpoint")
        with self._core.internal_computation():
            self._checkpoint.start_save(Path(path), state or {}, frozen=frozen, wait=wait)
            if wait:
                self._core.background_save.wait_or_raise()

    def finish_saving(self) -> bool:
        """Wait for the checkpoint that is being written. Return False, with a warning, if it failed, else True."""
        self._core.check_open()
        with self._core.internal_computation():
            return self._core.background_save.wait()

    def load(self, path: str | Path, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Load a checkpoint, written on any mesh, with any budgets and precision. Every process must call it.

        Args:
            path: Folder of the checkpoint.
            state: Objects by the names given to `save`; those with a `load_state_dict` are restored.

        Returns:
            The saved `state` as plain data.

        Raises:
            CheckpointError: The checkpoint is damaged or of another model or optimizer. Nothing has been changed.
        """
        self._core.check_open()
        self._core.check_not_averaged("loading a checkpoint")
        with self._core.internal_computation():
            return self._checkpoint.load(Path(path), state or {})

    def close(self, *, keep: bool = True) -> None:
        """Free all chunks and turn the parameters into ordinary tensors on the host.

        Trained ones are in full precision. Frozen ones are in the dtype of their chunks, and a warning of this module's
        logger says so if they were given in one of more bits.

        Args:
            keep: Keep the values. If False they become NaN, for models that do not fit in memory.

        Raises:
            DiskError, MoveError: A disk or transfer failed, and lost parameters are NaN. All memory has been freed.
        """
        if keep and not self._core.world.rank and not self._core.closed:
            warn_of_lost_digits(self._core.shards.managed_params)
        self._core.close(keep)
