"""User-facing engine: forward, backward, optimizer, state and checkpoints of a managed model."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar._distributed.process_group import Processes
from patrickstar._distributed.single_process import SINGLE_PROCESS
from patrickstar._dry_run.precision_choice import settle_precision, warn_of_slow_precision
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._engine.engine_call import engine_call
from patrickstar._engine.engine_state import EngineState
from patrickstar._engine.engine_view import EngineView
from patrickstar._engine.lost_digits import warn_of_lost_digits
from patrickstar._engine.param_init import WeightSource
from patrickstar._params.precision import cast_inputs
from patrickstar._schedule.coordination import Request
from patrickstar.config import Config
from patrickstar.errors import ModelError, TrainingError

if TYPE_CHECKING:
    pass  # imported on first use


class Engine(EngineView, EngineState):
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
            with core.cleanup_on_error(), core.data.residency.evaluation(key):
                return self.module(*args, **kwargs)
        with core.cleanup_on_error(), core.tracer.in_iteration(), ExitStack() as stack:
            core.begin_iteration(key, (args, kwargs))
            core.manager.begin_phase("forward")
            if core.activation_offload is not None:
                stack.enter_context(core.activation_offload.saving())
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
        with torch.no_grad(), core.cleanup_on_error():
            if core.tracer.open_key is not None:  # it is a part of the step, and of its trace
                with core.tracer.in_iteration():
                    return core.frozen[name](*args, **kwargs)
            with core.data.residency.evaluation((name, core.signature(args, kwargs))):
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
        with torch.no_grad(), self._core.cleanup_on_error():
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
                hyper-parameters in between. With several processes the update runs in the step as usual.
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
        if update and accumulate:
            raise TrainingError(
                "update=True requires that optimizer.step() comes next, accumulate=True another backward: choose one"
            )
        if update and self._core.scaler.enabled:
            raise TrainingError(
                "with fp16 no parameter can be updated before all gradients are known to be finite: leave out "
                "update=True, or use precision='bf16'"
            )
        # Gradients of several processes are complete only after all processes have synchronized, at the step.
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
            self._core.begin_speculation(self.optimizer.managed_groups, self.optimizer.param_groups)
        with self._core.cleanup_on_error():
            holds = self._core.interceptor.lock.begin_backward()
            try:
                with self._core.tracer.in_iteration():
                    self._core.interceptor.open_function_windows(loss)
                    scaled = loss * self._core.scaler.scale if self._core.scaler.enabled else loss
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
            finally:
                self._core.interceptor.gradient_hooks.backward_depth -= 1
                self._core.interceptor.lock.end_backward(holds)
            self._core.interceptor.end_backward()
            with torch.no_grad():
                self._core.data.op_boundary(belongs=True)

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
            gathered = self.world.all_gather(torch.tensor([value], dtype=torch.float64, device="cpu"))
            total: float = sum(gathered[:, 0].tolist())
            return total / self.world.size

    def close(self, *, keep: bool = True) -> None:
        """Free all chunks and turn the parameters into ordinary tensors on the host.

        Trained ones are in full precision. Frozen ones are in the dtype of their chunks, and a warning of this module's
        logger says so if they were given in one of more bits.

        Args:
            keep: Keep the values. If False they become NaN, for models that do not fit in memory.

        Raises:
            DiskError, MoveError: A disk or transfer failed, and lost parameters are NaN. All memory has been freed.
        """
        if keep and not self._core.world.rank and self._core.release.alive:
            warn_of_lost_digits(self._core.shards.managed_params)
        self._core.close(keep)
