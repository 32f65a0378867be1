"""The optimizer that users hold: a `torch.optim.Optimizer` whose states lie in chunks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from patrickstar.engine.parameters import slot_of
from patrickstar.engine.slot import Slot
from patrickstar.errors import ModelError
from patrickstar.kernels.adam import AdamStep
from patrickstar.layout.lists import EXP_AVG, EXP_AVG_SQ

if TYPE_CHECKING:
    from patrickstar.engine.engine import Engine


UNSUPPORTED = dict(amsgrad=False, maximize=False, capturable=False, differentiable=False)
"""Variants of torch's Adam that are not offered here, at the values that switch them off."""


class ChunkOptimizer(torch.optim.Optimizer):
    """Adam or AdamW over the engine's chunks. Param groups and learning-rate schedulers work as they do in torch."""

    def __init__(self, engine: "Engine") -> None:
        spec = engine.config.optimizer
        defaults = dict(lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        # What torch's own Adam keeps in its groups, so that either can load the other's state.
        defaults |= dict(decoupled_weight_decay=spec.decoupled, fused=True, foreach=None, **UNSUPPORTED)
        module = engine.module
        groups = list(spec.param_groups(module)) if spec.param_groups is not None else list(module.parameters())
        self._engine = engine
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, and consume these gradients.

        With fp16, a step whose gradients overflow changes nothing but the loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine._step(self._hyper_by_slot())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were not used for a step; after a step there are none."""
        self._engine._drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Adam` writes it: states by position, full precision, param groups with positions."""
        positions = self._positions()
        groups = []
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append(packed | {"params": [positions[self._slot(p)] for p in group["params"]]})
        state = {}
        for slot, position in positions.items():
            if slot.steps:
                state[position] = {"step": torch.tensor(float(slot.steps))} | {
                    kind: self._engine._state.read(slot, kind) for kind in (EXP_AVG, EXP_AVG_SQ)
                }
        return {"state": state, "param_groups": groups, "loss_scale": self._engine._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states and param groups back. Raises ModelError when groups differ in size, before anything changes."""
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ModelError(
                f"the saved optimizer has param groups of {sizes} parameters and this one of "
                f"{[len(group['params']) for group in self.param_groups]}; nothing was loaded"
            )
        asked = {key for packed in saved for key, off in UNSUPPORTED.items() if packed.get(key, off) != off}
        if asked:
            raise ModelError(f"the saved optimizer used {sorted(asked)}, which is not offered here; nothing was loaded")
        by_position = {position: slot for slot, position in self._positions().items()}
        for position, values in state_dict["state"].items():
            slot = by_position.get(position)
            if slot is None or not {"step", EXP_AVG, EXP_AVG_SQ} <= values.keys():
                raise ModelError(
                    f"the saved state of parameter {position} ({sorted(values)}) is not Adam's, or not of these "
                    f"{len(by_position)} parameters; nothing was loaded"
                )
            if not slot.scheme.trained:
                raise ModelError(f"parameter {slot.name!r} is frozen here but has saved optimizer states")
            for kind in (EXP_AVG, EXP_AVG_SQ):
                if tuple(values[kind].shape) != slot.shape:
                    raise ModelError(
                        f"{kind} of {slot.name!r} was saved as {tuple(values[kind].shape)}, not {slot.shape}"
                    )
        for position, slot in by_position.items():
            slot.steps = 0
            if slot.scheme.trained and position not in state_dict["state"]:
                for kind in (EXP_AVG, EXP_AVG_SQ):
                    self._engine._state.write(slot, kind, torch.zeros(()))
        self._engine._scaler.load_state_dict(state_dict.get("loss_scale", {}))
        for position, values in state_dict["state"].items():
            slot = by_position[position]
            slot.steps = int(values["step"])
            for kind in (EXP_AVG, EXP_AVG_SQ):
                self._engine._state.write(slot, kind, values[kind])
        for group, packed in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in packed.items() if key != "params"})

    def _slot(self, param: Any) -> Slot:
        slot = slot_of(param)
        if slot is None:
            raise ModelError(
                f"a parameter of shape {tuple(param.shape)} in the param groups does not belong to the engine's model; "
                f"was it replaced after ps.initialize?"
            )
        return slot

    def _positions(self) -> dict[Slot, int]:
        order = [self._slot(param) for group in self.param_groups for param in group["params"]]
        return {slot: position for position, slot in enumerate(order)}

    def _hyper_by_slot(self) -> dict[Slot, AdamStep]:
        hyper = {}
        for group in self.param_groups:
            step = AdamStep(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=group["decoupled_weight_decay"],
            )
            hyper.update({self._slot(param): step for param in group["params"]})
        return hyper
