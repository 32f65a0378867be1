"""`torch.optim.Optimizer` whose states are stored in chunks."""

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from patrickstar._autograd.module_hooks import WrappedMethod
from patrickstar._engine.averaging import averaged
from patrickstar._engine.core import EngineCore
from patrickstar._engine.optimizer_state import OptimizerState
from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar._schedule.coordination import Request
from patrickstar.errors import ConfigError, ModelError, TrainingError
from patrickstar.optim import Optimizer, TorchOptimizer

SWITCHES = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's optimizers that change the arithmetic: a state saved with one cannot be resumed without it."""


class ChunkOptimizer(torch.optim.Optimizer):
    """Configured optimizer over the chunks of an engine. Param groups and schedulers work as in torch.

    Created by the engine (`engine.optimizer`).

    Raises:
        ConfigError: The options or a param group ask for something that is not supported.
        ModelError: A param group contains a parameter that does not belong to the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        spec = core.config.optimizer
        module = core.module
        self._core = core
        self._average: AbstractContextManager[None] | None = None
        """Context in which the parameters are their average, while they are."""
        super().__init__(spec.groups(module), spec.defaults())
        self.state: Any = OptimizerState(core)
        if core.device.type == "cuda" and any(self.defaults.get(key) for key in ("fused", "capturable")):
            raise ConfigError(
                f"{type(spec).__name__}: fused=True and capturable=True keep states on the GPU, but chunks may be "
                f"updated on the host; leave these options out"
            )
        for number, group in enumerate(self.param_groups):
            self._check_group(number, group)
        if (together := core.optimizer_step.together) is not None:
            together.begin(self.param_groups)
        zero_grad = WrappedMethod(module, "zero_grad", partial(_zero_grad, weakref.ref(module), weakref.ref(self)))
        core.module_hooks.replace_attribute(module, "zero_grad", zero_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TrainingError(
            "the optimizer of an engine can't be pickled or copied: save it with engine.save(path), or save its "
            "state_dict()"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, and consume the gradients.

        With fp16, a step whose gradients overflow only changes the loss scale.

        Args:
            closure: Computes the loss; called first, with grad enabled.

        Returns:
            Result of `closure`, None without one.

        Raises:
            ConfigError: A param group asks for an option or state that the optimizer was not created with.
            TrainingError: Hyper-parameters changed after `backward(update=True)`, or the engine is closed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._core.check_open()
        self._core.interceptor.data_attribute.check(self._core.interceptor, writes=True)
        self._core.step(self.group_by_managed_param(), self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that no step has consumed.

        Args:
            set_to_none: If False, parameters that had a gradient get zeros, with which the next step updates them if no
                backward adds to them. The zeros take no memory.
        """
        self._core.drop_gradients(to_zeros=not set_to_none)

    def eval(self) -> None:
        """Let forwards read the average of the parameters, if the optimizer is schedule-free, until `train` is called.

        See `Engine.averaged`. It does nothing for other optimizers. Every process must call it.

        Raises:
            ConfigError: A class of torch has its own `eval`, which would change parameters outside of a step.
            TrainingError: Gradients are stored, or the engine is closed.
        """
        self._core.check_open()
        if isinstance(self._options, TorchOptimizer) and hasattr(self._options.kind, "eval"):
            raise ConfigError(
                f"{self._options.name}.eval changes parameters outside of a step, which is not supported; use "
                f"ps.ScheduleFreeAdamW, or ps.EMA(optimizer) and engine.averaged()"
            )
        groups = self.managed_groups()
        if self._average is None and any(self._options.average_weights(group) for group in groups.values()):
            average = averaged(self._core, groups)
            average.__enter__()
            self._average = average

    def train(self) -> None:
        """Let forwards read the parameters at which gradients are computed again; see `eval`."""
        average, self._average = self._average, None
        if average is not None:
            average.__exit__(None, None, None)

    def flush(self) -> None:
        """Make the next forward read the newest parameters: finish delayed updates. Every process must call it.

        Call it before an evaluation, and after the last step. Without `update` in `ps.Config` it does nothing.
        `state_dict`, checkpoints and exports have the newest values anyway.

        Raises:
            TrainingError: The engine is closed.
        """
        self._core.flush()

    def state_dict(self) -> dict[str, Any]:
        """Copy the optimizer state to the host in the format of `torch.optim`. Every process must call it.

        Returns:
            `state`: per parameter position, CPU tensors in full precision; `param_groups`: options and positions;
            `loss_scale`: state of the fp16 loss scaler.

        Raises:
            TrainingError: The engine is closed.
        """
        self._core.check_open()
        with self._core.close_on_data_loss():
            self._core.complete()
            self._core.sharing.synchronize_processes(Request.STATE)
            with self._core.sharing.collective_section():
                return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        positions = self._positions()
        groups = self._packed_groups(positions.__getitem__)
        state: dict[Any, Any] = {}
        together = self._core.optimizer_step.together
        self._core.sharing.share_optimizer_extra()
        for managed, position in positions.items():
            if managed.steps:
                absent = () if together is None else together.optimizer.absent(managed.name)
                listed = [kind for kind in managed.state_kinds if kind not in absent]
                tensors = {kind: self._core.model_state.read(managed, kind) for kind in listed}
                count = (
                    {} if self._options.counts_itself else {"step": torch.tensor(float(managed.steps), device="cpu")}
                )
                if saved := copy.deepcopy(managed.optimizer_extra) | count | tensors:
                    state[position] = saved
        saved = {"state": state, "param_groups": groups, "loss_scale": self._core.scaler.state_dict()}
        if together is not None:
            own = together.optimizer.saved()
            state.update(own.pop("state", {}))
            saved["own"] = own
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states and param groups in the format of `torch.optim`.

        Args:
            state_dict: Result of `state_dict`, or of the corresponding torch optimizer.

        Raises:
            ModelError: Param groups, states or shapes differ. Nothing has been changed.
            TrainingError: `backward(update=True)` was not followed by a step, or the engine is closed.
        """
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("loading a state")
        self._core.complete()
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ModelError(
                f"the saved optimizer has param groups of {sizes} parameters, this one has groups of "
                f"{[len(group['params']) for group in self.param_groups]}; nothing was loaded"
            )
        switches = {key for packed in saved for key in self._switched_on(packed)}
        if switches:
            raise ModelError(
                f"the saved optimizer used {sorted(switches)}, which this optimizer does not; nothing was loaded"
            )
        with self._core.close_on_data_loss():
            self._core.background_save.copy_all()
            self._load(state_dict, saved)

    def _load(self, state_dict: dict[str, Any], saved: list[dict[str, Any]]) -> None:
        by_position = {position: managed for managed, position in self._positions().items()}
        together, states = self._core.optimizer_step.together, dict(state_dict["state"])
        own = {key: states.pop(key) for key in list(states) if together is not None and not isinstance(key, int)}
        for position, values in states.items():
            managed = by_position.get(position)
            if managed is None:
                raise ModelError(
                    f"the saved optimizer has a state of parameter {position}, and this one has {len(by_position)} "
                    f"parameters; nothing was loaded"
                )
            if not managed.schema.trained:
                raise ModelError(f"parameter {managed.name!r} is frozen but has a saved state; nothing was loaded")
            if together is not None:  # it keeps what it is given
                continue
            needed = (*(("step",) if self._options.needs_count else ()), *managed.state_kinds)
            if not set(needed) <= values.keys():
                raise ModelError(
                    f"the saved state of {managed.name!r} has {sorted(values)}, but this optimizer needs "
                    f"{', '.join(needed)}; nothing was loaded"
                )
            known = {"step", *managed.state_kinds}
            unknown = [key for key, value in values.items() if key not in known and _shape(value) == managed.full_shape]
            if unknown:
                raise ModelError(
                    f"the saved state of {managed.name!r} has {', '.join(unknown)}, which "
                    f"{type(self._options).__name__} does not use: another optimizer saved it; nothing was loaded"
                )
            for kind in managed.state_kinds:
                if tuple(values[kind].shape) != managed.full_shape:
                    raise ModelError(
                        f"saved {kind} of {managed.name!r} has shape {tuple(values[kind].shape)}, "
                        f"not {managed.full_shape}"
                    )
        self._core.flush()
        self._core.optimizer_in_backward.begin_again()
        for position, managed in by_position.items():
            managed.steps, managed.observed = 0, False
            managed.optimizer_extra.clear()
            if managed.schema.trained and position not in states:
                for kind in managed.state_kinds:
                    self._core.model_state.write(managed, kind, torch.zeros((), device="cpu"))
        self._core.scaler.load_state_dict(state_dict.get("loss_scale", {}))
        absent = {}
        for position, values in states.items():
            interruption_point()
            managed = by_position[position]
            managed.steps = int(values.get("step", 1))
            listed = [kind for kind in managed.state_kinds if together is None or _is_listed(managed, values.get(kind))]
            absent[managed.name] = [kind for kind in managed.state_kinds if kind not in listed]
            stored = {*listed, *(() if self._options.counts_itself else ("step",))}
            managed.optimizer_extra.update(
                {key: copy.deepcopy(value) for key, value in values.items() if key not in stored}
            )
            for kind in listed:
                self._core.model_state.write(managed, kind, values[kind])
        self._update_groups(saved)
        if together is not None:
            together.optimizer.restore({"state": own, **state_dict.get("own", {}), "absent": absent})

    def _packed_groups(self, key_of: Callable[[ManagedParam], Any]) -> list[dict[str, Any]]:
        """Return the param groups with `key_of` a parameter in place of it."""
        return [
            {name: value for name, value in group.items() if name != "params"}
            | {"params": [key_of(self._managed_param(param)) for param in group["params"]]}
            for group in self.param_groups
        ]

    def _update_groups(self, packed_groups: list[dict[str, Any]]) -> None:
        """Set the options of the param groups to those of `packed_groups`; what a step has written since is dropped."""
        for group, packed in zip(self.param_groups, packed_groups, strict=True):
            for key in group.keys() - packed.keys() - self.defaults.keys() - {"params"}:
                del group[key]
            group.update({key: value for key, value in packed.items() if key != "params"})

    def _managed_param(self, param: Any) -> ManagedParam:
        managed = managed_param_of(param)
        if managed is None:
            raise ModelError(
                f"a parameter of shape {tuple(param.shape)} in the param groups does not belong to the engine's model; "
                f"was it replaced after ps.initialize?"
            )
        return managed

    def _positions(self) -> dict[ManagedParam, int]:
        order = [self._managed_param(param) for group in self.param_groups for param in group["params"]]
        return {managed: position for position, managed in enumerate(order)}

    @property
    def _options(self) -> Optimizer:
        return self._core.config.optimizer

    def group_by_managed_param(self) -> dict[ManagedParam, dict[str, Any]]:
        """Return the param group of each parameter that is in one.

        Raises:
            ConfigError: A group asks for an unsupported option, or for a state that has no chunk list.
            ModelError: A param group contains a parameter that does not belong to the engine.
        """
        for number, group in enumerate(self.param_groups):
            self._check_group(number, group)
        return {self._managed_param(param): group for group in self.param_groups for param in group["params"]}

    def managed_groups(self) -> dict[ManagedParam, dict[str, Any]]:
        """Return the param group of each parameter of the engine that is in one, unchecked."""
        return {
            managed: group
            for group in self.param_groups
            for param in group["params"]
            if (managed := managed_param_of(param)) is not None
        }

    def _switched_on(self, group: dict[str, Any]) -> list[str]:
        """Return the switches that a param group sets and the optimizer's options do not."""
        return [key for key in SWITCHES if group.get(key) and not self.defaults.get(key)]

    def _check_group(self, number: int, group: dict[str, Any]) -> None:
        name = type(self._options).__name__
        if switches := self._switched_on(group):
            raise ConfigError(
                f"param group {number} sets {', '.join(switches)}, which the options of {name} do not set"
            )
        managed_params = [managed for managed in map(managed_param_of, group["params"]) if managed is not None]
        lists = {managed.schema: managed.state_kinds for managed in managed_params if managed.schema.trained}
        needed = self._options.states_for(group)
        missing = [kind for kind in needed if not all(kind in kinds for kinds in lists.values())]
        if missing:
            raise ConfigError(
                f"param group {number} needs the state {', '.join(missing)}, which has no chunk list because the "
                f"options of {name} do not need it: set the same option there (for SGD a momentum above 0; schedulers "
                f"that change momentum have an option not to)"
            )


def _zero_grad(
    module: "weakref.ref[nn.Module]", optimizer: "weakref.ref[ChunkOptimizer]", set_to_none: bool = True
) -> None:
    """Zero the gradients of a module, those that a step has used included: its own `zero_grad` does not see them."""
    managing, managed = optimizer(), module()
    if managing is not None and not set_to_none:
        managing.zero_grad(set_to_none=False)
    elif managed is not None:
        type(managed).zero_grad(managed, set_to_none)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and value.dim() else None


def _is_listed(managed: ManagedParam, value: Any) -> bool:
    """Return whether a saved state can be stored in a chunk list of a parameter."""
    return _shape(value) == managed.full_shape and value.dtype == managed.full_dtype
