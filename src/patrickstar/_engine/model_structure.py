"""Record of a model's modules and parameters, to notice changes at little cost."""

from typing import Any

from torch import nn


class ModelStructure:
    """Modules of a model, their children, parameters and compiled calls, and which parameters are frozen."""

    def __init__(self, model: nn.Module) -> None:
        # References to everything keep the ids unique.
        self._modules = [
            (module, [*module._modules.values()], [*module._parameters.values()]) for module in model.modules()
        ]
        self._ids = [_ids(module) for module, _, _ in self._modules]
        self._frozen = [param for param in model.parameters() if not param.requires_grad]

    @property
    def unchanged(self) -> bool:
        """True if no module or parameter was added, replaced or removed, compiled or unfrozen."""
        if any(param.requires_grad for param in self._frozen):
            return False
        return all(_ids(module) == ids for (module, _, _), ids in zip(self._modules, self._ids, strict=True))


def _ids(module: Any) -> list[int]:
    return [*map(id, module._modules.values()), *map(id, module._parameters.values()), id(module._compiled_call_impl)]
