"""Record of a model's modules and parameters, to notice changes at little cost."""

from typing import Any

from torch import nn


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    if "_modules" in attributes:
        return attributes
    return {"_modules": module._modules, "_parameters": module._parameters}  # of a traced module, which C++ holds


class ModelStructure:
    """Modules of a model, their children, parameters and compiled calls, and which parameters are frozen."""

    def __init__(self, model: nn.Module) -> None:
        # The attributes of each module, without the search that `nn.Module` does.
        self._attributes = [_attributes_of(module) for module in model.modules()]
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        self._params = [*model.parameters()]
        self._classes = [*map(type, self._params)]
        self._parts = self._current_parts()
        """References to all parts, which keep their ids unique."""
        self._ids = [*map(id, self._parts)]

    @property
    def unchanged(self) -> bool:
        """True if no module or parameter was added, replaced or removed, compiled or unfrozen.

        `torch.utils.swap_tensors`, as in a conversion of a DTensor by `module.float()`, exchanges the class as well.
        """
        if any(param.requires_grad for param in self._frozen):
            return False
        if [*map(type, self._params)] != self._classes:
            return False
        return [*map(id, self._current_parts())] == self._ids

    def _current_parts(self) -> list[Any]:
        parts: list[Any] = []
        for attributes in self._attributes:
            parts += attributes["_modules"].values()
            parts += attributes["_parameters"].values()
            parts.append(attributes.get("_compiled_call_impl"))
        return parts
